"""Progress of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

    def tokens_per_pass(self, report: Mapping[str, Any]) -> float | None:
        """Without copies, which took no pass: the job's `report` has their tokens."""
        computed = self.completion_tokens - int(report.get("reused_tokens", 0))
        return computed / self.verifier_passes if self.verifier_passes else None
