"""A job's figures with what drafting brought, as commands and pages show them."""

from __future__ import annotations

from specbatch.pipeline.observe.terminal.summary import JobSummary
from specbatch.pipeline.policy.costs.savings import drafted, savings
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.records import JobRow


def summary_of(
    job: JobRow, progress: JobProgress, interrupted: bool = False, usd: float | None = None
) -> JobSummary:
    """`interrupted`: begun, and nobody works on it. `usd`: what all of it cost, if known."""
    saved = savings(job.report)
    speedup = None if saved is None else saved.speedup
    is_drafted = drafted(job.report, progress.proposed)
    return JobSummary(job, progress, speedup, is_drafted, interrupted, usd)
