"""The figures of a job, computed from its row and its progress and printed as one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from specbatch.pipeline.observe.terminal.progress import INTERRUPTED
from specbatch.schemas.best_by import SCORED, UNSCORED
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.malformed import CONTINUED, MENDED, QUARANTINED, RETRIED
from specbatch.schemas.policies import NO_VERDICT, Ruling, in_report
from specbatch.schemas.records import JobRow, Verification

_MALFORMED = {
    CONTINUED: "continued",
    RETRIED: "sampled again",
    MENDED: "have it now",
    QUARANTINED: "in quarantine",
}
_RULED = {
    Ruling.REDACT: "redacted",
    Ruling.BLOCK: "blocked",
    Ruling.REVIEW: "held back for review at first",
}


@dataclass(frozen=True, slots=True)
class JobSummary:
    """The figures of one job, finished or not; None where there is nothing to compute one from."""

    job: JobRow
    progress: JobProgress
    speedup: float | None  # time at depth 0 ÷ time taken, where that was measured
    drafted: bool  # whether anything was drafted, for any row
    interrupted: bool = False  # begun, and nobody works on it
    usd: float | None = None  # what all of it cost, with lost attempts and all that has a price

    @property
    def wall_sec(self) -> float | None:
        begin, end = self.job.started_at, self.job.finished_at
        return None if begin is None or end is None else max(0.0, end - begin)

    @property
    def tokens_per_sec(self) -> float | None:
        return _ratio(self.progress.completion_tokens, self.wall_sec or 0.0)

    @property
    def tokens_per_pass(self) -> float | None:
        return self.progress.tokens_per_pass(self.job.report)

    @property
    def cost_per_1k_usd(self) -> float | None:
        usd = self.progress.cost_usd if self.usd is None else self.usd
        return _ratio(1000 * usd, self.progress.completion_tokens)


def summary_rows(summary: JobSummary) -> list[tuple[str, str]]:
    """The table's lines, as text."""
    s, job, progress, report = summary, summary.job, summary.progress, summary.job.report
    otherwise = "no draft was verified" if s.drafted else "nothing was drafted"
    unknown = "not measured" if s.drafted else "nothing was drafted"
    speed = "" if s.tokens_per_sec is None else f" ({s.tokens_per_sec:,.0f} per second)"
    rows = [
        ("job", f"{job.job_id} ({job.name})"),
        ("state", INTERRUPTED if s.interrupted else str(progress.state)),
        ("prompts", f"{progress.rows_total:,}"),
        ("failed", f"{progress.rows_failed:,}"),
        ("tokens", f"{progress.completion_tokens:,}{speed}"),
        ("acceptance rate", _shown(progress.acceptance_rate, "{:.1%}", otherwise)),
        ("verified tokens per verifier pass", _shown(s.tokens_per_pass, "{:.2f}")),
        ("time from start to end", _shown(s.wall_sec, "{:.1f} s")),
        ("time in queue, all groups", f"{progress.queue_sec:.1f} s"),
        ("time in compute, all groups", f"{progress.compute_sec:.1f} s"),
        *_costs(s),
        ("measured speed-up over depth 0", _shown(s.speedup, "{:.2f}×", unknown)),
    ]
    if shadowed := int(report.get("shadow_proposed", 0)):  # compared with the output, not verified
        share = int(report["shadow_accepted"]) / shadowed
        rows.append(("drafts in shadow", f"{share:.1%} of {shadowed:,} would have been accepted"))
    verification = job.spec.get("speculation", {}).get("verification", Verification.COUPLED)
    if verification != Verification.COUPLED:
        rows.append(("verification", f"{verification}: outputs depend on the drafts"))
    ruled = {said: int(report.get(in_report(ruling), 0)) for ruling, said in _RULED.items()}
    if any(ruled.values()):
        shown = ", ".join(f"{count:,} {said}" for said, count in ruled.items() if count)
        rows.append(("outputs by content policies", shown))
    if failed := int(report.get(NO_VERDICT, 0)):
        rows.append(("outputs that a policy gave no verdict on", f"{failed:,}; the log says why"))
    if shown := _mended(report):
        rows.append(("outputs without their form", shown))
    if SCORED in report:
        scored, without = int(report[SCORED]), int(report[UNSCORED])
        missing = f"; {without:,} without a score, the log says why" if without else ""
        rows.append(("outputs scored to choose the best", f"{scored:,}{missing}"))
    if reused := int(report.get("reused", 0)):
        saved = f"${report.get('reuse_saved_usd', 0.0):.6f} when they were computed"
        rows.append(("outputs reused", f"{reused:,}; {saved}"))
    if checked := int(report.get("reuse_checked", 0)):
        differing = int(report.get("reuse_differing", 0))
        found = f"{differing:,} of {checked:,}"
        rows.append(("reuse check: outputs that differ", found))
    if rechecked := int(report.get("rechecked_tokens", 0)):  # where bits may depend on the batch
        differing = int(report["differing_tokens"])
        margin = f" (margin at most {report['largest_margin']:.2g})" if differing else ""
        found = f"{differing:,} of {rechecked:,}{margin}"
        rows.append(("sampled tokens that differ when computed alone", found))
    return rows


def _mended(report: Mapping[str, Any]) -> str:
    """What was done about outputs that ended without their form; empty where nothing was."""
    counts = {said: int(report.get(name, 0)) for name, said in _MALFORMED.items()}
    return ", ".join(f"{count:,} {said}" for said, count in counts.items() if count)


def _costs(summary: JobSummary) -> list[tuple[str, str]]:
    """Under the name "cost" only what `specbatch cost` shows, too."""
    per_1k = _shown(summary.cost_per_1k_usd, "${:.6f}")
    if summary.usd is not None:
        return [("cost", f"${summary.usd:.6f}"), ("cost per 1k tokens", per_1k)]
    shown = f"${summary.progress.cost_usd:.6f} (`specbatch cost` has the whole)"
    return [("device cost of recorded rows", shown), ("device cost per 1k tokens", per_1k)]


def summary_table(summary: JobSummary) -> Table:
    """The same as a table."""
    table = Table(title="summary", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in summary_rows(summary):
        table.add_row(name, value)
    return table


def _ratio(value: float, by: float) -> float | None:
    return value / by if by else None


def _shown(value: float | None, form: str, otherwise: str = "-") -> str:
    return otherwise if value is None else form.format(value)
