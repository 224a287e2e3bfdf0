"""What earlier jobs of a name say of the cost of the next one."""

from __future__ import annotations

from specbatch.jobs.cli.cost import cost_of
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.policy.costs.forecast import Forecast, PastJob, Range, forecast
from specbatch.pipeline.policy.costs.job_costs import JobCost
from specbatch.schemas.provenance import TimeKind
from specbatch.schemas.records import JobState
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec

PAST_RUNS = 10  # the newest, that a forecast rests on
_LOOKED_AT = 500
NO_HISTORY = "none: no finished job of this name, tenant and verifier has a known time"


def forecast_of(
    settings: Settings, spec: JobSpec, prompt_tokens: int, completions: int, most_tokens: int
) -> Forecast | None:
    """None without earlier jobs of the same tenant, name and verifier that are done."""
    store = make_store(settings)
    try:
        same = [
            job
            for job in store.list_jobs(_LOOKED_AT, JobState.DONE)
            if (job.tenant, job.name, job.verifier) == (spec.tenant, spec.name, spec.verifier)
        ]
        past = [_past(cost_of(store, job)) for job in same[:PAST_RUNS]]
    finally:
        store.close()
    return forecast([job for job in past if job.seconds], prompt_tokens, completions, most_tokens)


def _past(cost: JobCost) -> PastJob:
    sheet = cost.sheet
    prefill = sheet.of(TimeKind.PREFILL)
    return PastJob(
        prefill_usd=prefill.usd,
        other_usd=(sheet.total - prefill).usd,
        prompt_tokens=sum(row.prompt_tokens for row in cost.rows),
        completion_tokens=sum(row.completion_tokens for row in cost.rows),
        completions=sum(row.completions for row in cost.rows),
        seconds=sheet.total.sec,
    )


def forecast_rows(told: Forecast | None) -> list[tuple[str, str]]:
    """Lines of a plan's table."""
    if told is None:
        return [("forecast", NO_HISTORY)]
    return [
        ("forecast by earlier jobs of this name", f"{told.jobs:,}"),
        ("forecast cost", _range(told.usd, "${:.6f}")),
        ("forecast completion tokens", _range(told.completion_tokens, "{:,.0f}")),
        ("forecast time", _range(told.sec, "{:,.1f} s")),
        ("cost per 1k prompt tokens", _range(told.usd_per_1k_prompt, "${:.6f}")),
        ("cost per 1k completion tokens", _range(told.usd_per_1k_completion, "${:.6f}")),
    ]


def _range(told: Range, form: str) -> str:
    middle, low, high = (form.format(value) for value in (told.middle, told.low, told.high))
    return middle if low == high else f"{middle} ({low} to {high})"
