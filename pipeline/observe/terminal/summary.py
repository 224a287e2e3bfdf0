"""The figures of a job, computed from its row and its progress and printed as one table."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.records import JobRow, JobState, Verification


@dataclass(frozen=True, slots=True)
class JobSummary:
    """The figures of one job; None where there is nothing to compute one from."""

    job_id: str
    name: str
    state: JobState
    prompts: int
    failed: int
    completions: int
    prompt_tokens: int
    tokens: int
    acceptance_rate: float | None
    tokens_per_pass: float | None
    wall_sec: float | None
    tokens_per_sec: float | None
    queue_sec: float
    compute_sec: float
    cost_usd: float
    cost_per_1k_usd: float | None
    drafted: bool  # whether anything was drafted, for any row
    speedup: float | None  # time at depth 0 ÷ time taken, where that was measured
    verification: str
    rechecked_tokens: int  # a sample, where bits may depend on the batch
    differing_tokens: int  # of those, that differ when computed alone
    largest_margin: float  # between the scores of two such tokens
    shadow_proposed: int  # draft tokens that were compared with the output and not verified
    shadow_accepted: int  # of those, that would have been accepted
    output: str
    error: str | None


def summarize(
    job: JobRow, progress: JobProgress, speedup: float | None, drafted: bool
) -> JobSummary:
    """The figures of a job, finished or not; the caller knows what drafting brought."""
    wall = _wall_sec(job)
    tokens = progress.completion_tokens
    return JobSummary(
        job_id=job.job_id,
        name=job.name,
        state=progress.state,
        prompts=progress.rows_total,
        failed=progress.rows_failed,
        completions=progress.completions,
        prompt_tokens=progress.prompt_tokens,
        tokens=tokens,
        acceptance_rate=progress.acceptance_rate,
        tokens_per_pass=_ratio(tokens, progress.verifier_passes),
        wall_sec=wall,
        tokens_per_sec=_ratio(tokens, wall or 0.0),
        queue_sec=progress.queue_sec,
        compute_sec=progress.compute_sec,
        cost_usd=progress.cost_usd,
        cost_per_1k_usd=_ratio(1000 * progress.cost_usd, tokens),
        drafted=drafted,
        speedup=speedup,
        verification=str(job.spec.get("speculation", {}).get("verification", Verification.COUPLED)),
        rechecked_tokens=int(job.report.get("rechecked_tokens", 0)),
        differing_tokens=int(job.report.get("differing_tokens", 0)),
        largest_margin=float(job.report.get("largest_margin", 0.0)),
        shadow_proposed=int(job.report.get("shadow_proposed", 0)),
        shadow_accepted=int(job.report.get("shadow_accepted", 0)),
        output=job.output_uri,
        error=job.error,
    )


def summary_rows(summary: JobSummary) -> list[tuple[str, str]]:
    """The table's lines, as text."""
    s = summary
    otherwise = "no draft was verified" if s.drafted else "nothing was drafted"
    unknown = "not measured" if s.drafted else "nothing was drafted"
    rows = [
        ("job", f"{s.job_id} ({s.name})"),
        ("state", str(s.state)),
        ("prompts", f"{s.prompts:,}"),
        ("failed", f"{s.failed:,}"),
        ("tokens", f"{s.tokens:,}" + _aside(s.tokens_per_sec, "{:,.0f} per second")),
        ("acceptance rate", _shown(s.acceptance_rate, "{:.1%}", otherwise)),
        ("verified tokens per verifier pass", _shown(s.tokens_per_pass, "{:.2f}")),
        ("time from start to end", _shown(s.wall_sec, "{:.1f} s")),
        ("time in queue, all groups", f"{s.queue_sec:.1f} s"),
        ("time in compute, all groups", f"{s.compute_sec:.1f} s"),
        _cost(s),
        ("cost per 1k tokens", _shown(s.cost_per_1k_usd, "${:.6f}")),
        ("measured speed-up over depth 0", _shown(s.speedup, "{:.2f}×", unknown)),
    ]
    if s.shadow_proposed:
        share = s.shadow_accepted / s.shadow_proposed
        found = f"{share:.1%} of {s.shadow_proposed:,} would have been accepted"
        rows.append(("drafts in shadow", found))
    if s.verification != Verification.COUPLED:
        rows.append(("verification", f"{s.verification}: outputs depend on the drafts"))
    if s.rechecked_tokens:
        found = f"{s.differing_tokens:,} of {s.rechecked_tokens:,}"
        aside = f" (margin at most {s.largest_margin:.2g})" if s.differing_tokens else ""
        rows.append(("sampled tokens that differ when computed alone", found + aside))
    return rows


def _cost(s: JobSummary) -> tuple[str, str]:
    """Time that was lost, or has no recorded rows yet, is in `specbatch cost` alone."""
    shown = f"${s.cost_usd:.6f}"
    if s.state is JobState.DONE:
        return "cost", shown
    return "cost of recorded rows", f"{shown} (`specbatch cost` includes what was lost)"


def summary_table(summary: JobSummary) -> Table:
    """The same as a table."""
    table = Table(title="summary", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in summary_rows(summary):
        table.add_row(name, value)
    return table


def _wall_sec(job: JobRow) -> float | None:
    if job.started_at is None or job.finished_at is None:
        return None
    return max(0.0, job.finished_at - job.started_at)


def _ratio(value: float, by: float) -> float | None:
    return value / by if by else None


def _shown(value: float | None, form: str, otherwise: str = "-") -> str:
    return otherwise if value is None else form.format(value)


def _aside(value: float | None, form: str) -> str:
    return "" if value is None else f" ({form.format(value)})"
