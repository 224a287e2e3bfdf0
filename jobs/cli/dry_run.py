"""`submit-job --dry-run`: read and check the whole input, count, reckon time and cost.

Where a template makes the prompts, the first ones are shown as the model reads them.
"""

from __future__ import annotations

import resource
import sys
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from specbatch.jobs.cli.checks import check_job
from specbatch.jobs.cli.console import err, out, remark, say, say_json
from specbatch.jobs.cli.cost import cost_of
from specbatch.jobs.cli.outcome import ROWS_COUNT
from specbatch.pipeline.bootstrap import make_store, priced_device
from specbatch.pipeline.inputs.token_bounds import longest_sample, most_tries
from specbatch.pipeline.observe.units import plural
from specbatch.pipeline.policy.costs.forecast import Forecast, PastJob, Range, forecast
from specbatch.pipeline.policy.costs.job_costs import JobCost
from specbatch.pipeline.policy.costs.pricing import MICROUSD_PER_USD, device_usd
from specbatch.pipeline.privacy.tenants import NOBODY_PRIVATE, Privacy
from specbatch.schemas.errors import SpecbatchError
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.provenance import TimeKind
from specbatch.schemas.records import JobState, PromptRow
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.sqlite_urls import file_of_url
from specbatch.schemas.table_spec import LAST
from specbatch.schemas.visible import one_line

if TYPE_CHECKING:
    from specbatch.pipeline.operations.preflight import Checked

ASSUMED_TOKENS_PER_SEC = 1000.0
HISTORY = 5  # finished jobs that the speed is taken from
PAST_RUNS = 10  # the newest, that a forecast rests on
LOOKED_AT = 500  # finished jobs among which both are searched
NO_HISTORY = "none: no finished job of this name, tenant and verifier has a known time"
EXAMPLES = 3
_MOST_CHARS = 2000  # of a prompt that is shown


@dataclass(frozen=True, slots=True)
class FirstPrompt:
    """A row's prompt as the model reads it. `text` is None where the tenant's texts are not
    kept, and redacted where they are kept so."""

    row_index: int
    row_id: str
    tokens: int
    text: str | None


@dataclass(slots=True)
class Plan:
    """What the job would do. Nothing is kept of the rows but counts and a few examples."""

    rows: int = 0
    prompts: int = 0
    rows_failed: int = 0
    completions: int = 0
    groups: int = 0
    prompt_tokens: int = 0
    longest_prompt_tokens: int = 0
    max_completion_tokens: int = 0  # of the output
    max_sampled_tokens: int = 0  # with those of malformed outputs, which are sampled again
    quarantined: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    first_prompts: list[FirstPrompt] = field(default_factory=list)
    tokens_per_sec: float = ASSUMED_TOKENS_PER_SEC
    speed_from: str = (
        "assumed, because no job with this verifier has finished here; --tokens-per-sec changes it"
    )
    estimated_sec: float = 0.0
    estimated_cost_usd: float = 0.0
    forecast: Forecast | None = None
    peak_rss_mib_above_imports: float = 0.0


def show_plan(settings: Settings, spec: JobSpec, tokens_per_sec: float | None, json: bool) -> None:
    """Print the plan; nothing is stored, started or written."""
    checked = check_job(settings, spec)
    if spec.input.since == LAST:
        remark("what is new is known when the job is submitted: this plan is of the whole table")
    before = _rss_mib()
    plan = make_plan(checked, spec, Privacy.of_settings(settings))
    plan.peak_rss_mib_above_imports = round(max(0.0, _peak_rss_mib() - before), 1)
    _learn_from_earlier_jobs(plan, settings, spec)
    if tokens_per_sec is not None:
        plan.tokens_per_sec, plan.speed_from = tokens_per_sec, "as --tokens-per-sec says"
    plan.estimated_sec = plan.max_sampled_tokens / plan.tokens_per_sec
    price_usd = priced_device(settings).price_microusd / MICROUSD_PER_USD
    plan.estimated_cost_usd = device_usd(plan.estimated_sec, price_usd)
    if json:
        say_json({"dry_run": True, **asdict(plan), "output": spec.output.uri})
    else:
        _print(plan, spec)


def make_plan(checked: Checked, spec: JobSpec, privacy: Privacy = NOBODY_PRIVATE) -> Plan:
    """Plan every group and count it, a group at a time. Raises `InputError` and `ObjectError`."""
    total = Plan()
    with err.status("reading the input ...") as status:
        for group in checked.groups():
            _count(total, group, spec, checked.context_tokens)
            if spec.input.is_templated:
                more = group.rows[: EXAMPLES - len(total.first_prompts)]
                total.first_prompts += [_shown(row, checked, privacy) for row in more]
            status.update(f"reading the input ... {total.rows:,} rows")
    return total


def _shown(row: PromptRow, checked: Checked, privacy: Privacy) -> FirstPrompt:
    mode, tokens = privacy.mode_of(checked.spec.tenant), len(row.prompt_ids)
    if mode is PrivacyMode.HASH_ONLY:
        return FirstPrompt(row.row_index, "", tokens, None)
    kept = str if mode.is_full else privacy.redactor.redacted
    text = kept(checked.tokenizer.shown(row.prompt_ids))
    return FirstPrompt(row.row_index, kept(row.row_id), tokens, text[:_MOST_CHARS])


def _count(total: Plan, group: Any, spec: JobSpec, context_tokens: int) -> None:
    total.rows = group.next_row
    total.groups += bool(group.rows)
    total.prompts += len(group.rows)
    total.rows_failed += len(group.rejected)
    for row in group.rows:
        tokens = len(row.prompt_ids)
        most = row.n * min(longest_sample(spec, row), context_tokens - tokens)
        total.completions += row.n
        total.prompt_tokens += tokens
        total.longest_prompt_tokens = max(total.longest_prompt_tokens, tokens)
        total.max_completion_tokens += most
        total.max_sampled_tokens += most * most_tries(spec, row)
    for bad in group.rejected:
        total.quarantined[bad.code] = total.quarantined.get(bad.code, 0) + 1
        shown = total.examples.setdefault(bad.code, [])
        if len(shown) < EXAMPLES:
            shown.append(f"row {bad.row_index}: {bad.reason}")


def _learn_from_earlier_jobs(plan: Plan, settings: Settings, spec: JobSpec) -> None:
    """The speed of those with this verifier, and a forecast by those of the same tenant and name.

    A plan needs no store, and a dry run must not make a database.
    """
    file = file_of_url(settings.store_url)
    if file is not None and not file.is_file():
        return
    with suppress(SpecbatchError), closing(make_store(settings)) as store:
        done = store.list_jobs(LOOKED_AT, JobState.DONE)
        # Copies take no time: a job with some tells nothing of what computing takes.
        alike = [j for j in done if j.verifier == spec.verifier and not j.report.get("reused")]
        found = [store.progress(job.job_id) for job in alike[:HISTORY]]
        tokens = sum(progress.completion_tokens for progress in found)
        seconds = sum(progress.compute_sec for progress in found)
        if tokens and seconds:
            plan.tokens_per_sec = tokens / seconds
            plan.speed_from = f"measured on earlier jobs with this verifier ({len(found)})"
        same = [job for job in alike if (job.tenant, job.name) == (spec.tenant, spec.name)]
        past = [_past(cost_of(store, job)) for job in same[:PAST_RUNS]]
        most = (plan.prompt_tokens, plan.completions, plan.max_completion_tokens)
        plan.forecast = forecast([job for job in past if job.seconds], *most)


def _past(cost: JobCost) -> PastJob:
    sheet = cost.sheet
    prefill = sheet.of(TimeKind.PREFILL)
    return PastJob(
        prefill_usd=prefill.usd,
        other_usd=(cost.total - prefill).usd,
        prompt_tokens=sum(row.prompt_tokens for row in cost.rows),
        completion_tokens=sum(row.completion_tokens for row in cost.rows),
        completions=sum(row.completions for row in cost.rows),
        seconds=sheet.total.sec,
    )


def _print(plan: Plan, spec: JobSpec) -> None:
    table = Table(title="plan: nothing was started", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    speed = f"{plan.tokens_per_sec:,.0f} tokens per second, {plan.speed_from}"
    for name, value in (
        ("rows in the input", f"{plan.rows:,}"),
        ("prompts", f"{plan.prompts:,}"),
        ("rows to quarantine", f"{plan.rows_failed:,}"),
        ("groups", f"{plan.groups:,}"),
        ("completions", f"{plan.completions:,}"),
        ("prompt tokens", f"{plan.prompt_tokens:,} (longest {plan.longest_prompt_tokens:,})"),
        ("completion tokens, at most", f"{plan.max_completion_tokens:,}"),
        *_sampled_again(plan),
        ("speed", speed),
        ("time, at most", f"{plan.estimated_sec:,.0f} s of one device"),
        ("cost, at most", f"${plan.estimated_cost_usd:.6f}"),
        *_forecast_rows(plan.forecast),
        ("output", spec.output.uri),
        ("peak memory above imports", f"{plan.peak_rss_mib_above_imports:,.0f} MiB"),
    ):
        table.add_row(name, value)
    out.print(table)
    for prompt in plan.first_prompts:
        _say_cut(_line_of(prompt))
    for code, count in sorted(plan.quarantined.items(), key=lambda item: -item[1]):
        say(f"quarantine, {code}: {count:,}")
        for example in plan.examples[code]:
            say(f"    {example}")
    if plan.quarantined:
        say(f"    {ROWS_COUNT}")


def _sampled_again(plan: Plan) -> list[tuple[str, str]]:
    if plan.max_sampled_tokens == plan.max_completion_tokens:
        return []
    return [("… with all retries", f"{plan.max_sampled_tokens:,}")]


def _line_of(prompt: FirstPrompt) -> str:
    """A prompt on one line, its line ends spelled out."""
    named = f" (id {prompt.row_id})" if prompt.row_id else ""
    shown = "its text is not kept" if prompt.text is None else one_line(prompt.text)
    return f"row {prompt.row_index}{named}, {plural(prompt.tokens, 'token')}: {shown}"


def _say_cut(line: str) -> None:
    """A line, cut to the width of stdout."""
    cut = Text(line)
    cut.truncate(out.width, overflow="ellipsis")
    say(cut.plain)


def _forecast_rows(forecast: Forecast | None) -> list[tuple[str, str]]:
    """Lines of a plan's table."""
    if forecast is None:
        return [("forecast", NO_HISTORY)]
    return [
        ("forecast by earlier jobs of this name", f"{forecast.jobs:,}"),
        ("forecast cost", _range(forecast.usd, "${:.6f}")),
        ("forecast completion tokens", _range(forecast.completion_tokens, "{:,.0f}")),
        ("forecast time", _range(forecast.sec, "{:,.1f} s")),
        ("cost per 1k prompt tokens", _range(forecast.usd_per_1k_prompt, "${:.6f}")),
        ("cost per 1k completion tokens", _range(forecast.usd_per_1k_completion, "${:.6f}")),
    ]


def _range(amount: Range, form: str) -> str:
    middle, low, high = (form.format(value) for value in (amount.middle, amount.low, amount.high))
    return middle if low == high else f"{middle} ({low} to {high})"


def _peak_rss_mib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def _rss_mib() -> float:
    """Memory in use now; the peak so far if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return _peak_rss_mib()
    return pages * resource.getpagesize() / 2**20
