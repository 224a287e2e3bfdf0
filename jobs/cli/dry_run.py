"""`submit-job --dry-run`: read and check the whole input, count, reckon time and cost."""

from __future__ import annotations

import resource
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from specbatch.jobs.cli.connect import client
from specbatch.jobs.cli.console import err, out, say, say_json
from specbatch.jobs.cli.forecasting import forecast_of, forecast_rows
from specbatch.jobs.cli.preflight import check_job
from specbatch.pipeline.bootstrap import priced_device
from specbatch.pipeline.policy.costs.forecast import Forecast
from specbatch.pipeline.policy.costs.pricing import MICROUSD_PER_USD, device_usd
from specbatch.schemas.errors import SpecbatchError
from specbatch.schemas.records import JobRow, JobState
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec

if TYPE_CHECKING:
    from specbatch.pipeline.operations.preflight import Checked

ASSUMED_TOKENS_PER_SEC = 1000.0
HISTORY = 5  # finished jobs that the speed is taken from
EXAMPLES = 3


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
    max_completion_tokens: int = 0
    quarantined: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    tokens_per_sec: float = ASSUMED_TOKENS_PER_SEC
    speed_from: str = ""
    estimated_sec: float = 0.0
    estimated_cost_usd: float = 0.0
    forecast: Forecast | None = None
    peak_rss_mib_above_imports: float = 0.0


def show_plan(settings: Settings, spec: JobSpec, tokens_per_sec: float | None, json: bool) -> None:
    """Print the plan; nothing is stored, started or written."""
    checked = check_job(settings, spec)
    before = _rss_mib()
    plan = make_plan(checked, spec)
    plan.peak_rss_mib_above_imports = round(max(0.0, _peak_rss_mib() - before), 1)
    if tokens_per_sec is not None:
        plan.tokens_per_sec, plan.speed_from = tokens_per_sec, "as --tokens-per-sec says"
    else:
        plan.tokens_per_sec, plan.speed_from = speed_of_earlier_jobs(settings, spec.verifier)
    plan.estimated_sec = plan.max_completion_tokens / plan.tokens_per_sec
    price_usd = priced_device(settings).price_microusd / MICROUSD_PER_USD
    plan.estimated_cost_usd = device_usd(plan.estimated_sec, price_usd)
    plan.forecast = _forecast(settings, spec, plan)
    if json:
        say_json({"dry_run": True, **asdict(plan), "output": spec.output.uri})
    else:
        _print(plan, spec)


def make_plan(checked: Checked, spec: JobSpec) -> Plan:
    """Plan every group and count it, a group at a time. Raises `InputError` and `ObjectError`."""
    total = Plan()
    with err.status("reading the input ...") as status:
        for group in checked.groups():
            _count(total, group, spec.sampling.max_tokens, checked.context_tokens)
            status.update(f"reading the input ... {total.rows:,} rows")
    return total


def _count(total: Plan, group: Any, max_tokens: int, context_tokens: int) -> None:
    total.rows = group.next_row
    total.groups += bool(group.rows)
    total.prompts += len(group.rows)
    total.rows_failed += len(group.rejected)
    for row in group.rows:
        tokens = len(row.prompt_ids)
        most = min(row.overrides.get("max_tokens", max_tokens), context_tokens - tokens)
        total.completions += row.n
        total.prompt_tokens += tokens
        total.longest_prompt_tokens = max(total.longest_prompt_tokens, tokens)
        total.max_completion_tokens += row.n * most
    for bad in group.rejected:
        total.quarantined[bad.code] = total.quarantined.get(bad.code, 0) + 1
        shown = total.examples.setdefault(bad.code, [])
        if len(shown) < EXAMPLES:
            shown.append(f"row {bad.row_index}: {bad.reason}")


def speed_of_earlier_jobs(settings: Settings, verifier: str) -> tuple[float, str]:
    """Tokens per second of compute of earlier jobs with this verifier, and where it is from."""
    tokens = seconds = 0.0
    found: list[JobRow] = []
    try:
        if _has_store(settings):
            with client(settings) as c:
                found = [j for j in c.jobs(500, JobState.DONE) if j.verifier == verifier][:HISTORY]
                for progress in (c.progress(job.job_id) for job in found):
                    tokens += progress.completion_tokens
                    seconds += progress.compute_sec
    except SpecbatchError:
        pass  # a plan needs no store
    if tokens and seconds:
        return tokens / seconds, f"measured on earlier jobs with this verifier ({len(found)})"
    return ASSUMED_TOKENS_PER_SEC, (
        "assumed, because no job with this verifier has finished here; --tokens-per-sec changes it"
    )


def _forecast(settings: Settings, spec: JobSpec, plan: Plan) -> Forecast | None:
    try:
        if not _has_store(settings):
            return None
        tokens = (plan.prompt_tokens, plan.completions, plan.max_completion_tokens)
        return forecast_of(settings, spec, *tokens)
    except SpecbatchError:
        return None  # a plan needs no store


def _has_store(settings: Settings) -> bool:
    """A dry run must not make a database."""
    scheme, _, path = settings.store_url.partition(":///")
    return not scheme.startswith("sqlite") or Path(path).is_file()


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
        ("speed", speed),
        ("time, at most", f"{plan.estimated_sec:,.0f} s of one device"),
        ("cost, at most", f"${plan.estimated_cost_usd:.6f}"),
        *forecast_rows(plan.forecast),
        ("output", spec.output.uri),
        ("peak memory above imports", f"{plan.peak_rss_mib_above_imports:,.0f} MiB"),
    ):
        table.add_row(name, value)
    out.print(table)
    for code, count in sorted(plan.quarantined.items(), key=lambda item: -item[1]):
        say(f"quarantine, {code}: {count:,}")
        for example in plan.examples[code]:
            say(f"    {example}")


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
