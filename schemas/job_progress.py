"""Progress of a job."""

from __future__ import annotations

from dataclasses import dataclass

from specbatch.schemas.records import JobState


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Current counts of one job, read with a few aggregate queries."""

    job_id: str
    state: JobState
    rows_total: int
    rows_done: int  # rows of finished groups plus quarantined rows
    rows_failed: int  # quarantined, or finished with an error
    groups_total: int
    groups_done: int
    completions: int
    prompt_tokens: int
    completion_tokens: int
    proposed: int
    accepted: int
    verifier_passes: int
    queue_sec: float
    compute_sec: float
    cost_usd: float
    ingest_done: bool

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted ÷ proposed draft tokens; None when nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None
