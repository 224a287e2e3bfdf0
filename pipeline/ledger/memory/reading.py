"""What `MemoryStore` tells of a job's rows and groups."""

from __future__ import annotations

from collections.abc import Iterator

from specbatch.pipeline.ledger.memory.chain import ChainInMemory
from specbatch.schemas.mapper import without_details
from specbatch.schemas.records import CompletionRecord, Prompts, RejectedRow, Stage


class ReadingInMemory(ChainInMemory):
    """The part that publishing and exporting read."""

    def completions(
        self,
        job_id: str,
        batch: int = 1000,  # noqa: ARG002 - nothing to page
        details: bool = True,
    ) -> Iterator[CompletionRecord]:
        with self._lock:
            job = self._jobs.get(job_id)
            records = [c for _, c in sorted(job.completions.items())] if job else []
            return iter(records if details else map(without_details, records))

    def rejected(self, job_id: str) -> Iterator[RejectedRow]:
        with self._lock:
            job = self._jobs.get(job_id)
            return iter([r for _, r in sorted(job.rejected.items())] if job else [])

    def failed_groups(self, job_id: str) -> list[tuple[int, str, Prompts, str]]:
        with self._lock:
            job = self._jobs.get(job_id)
            return [
                (index, g.stage.value, g.prompts, g.last_error or "")
                for index, g in sorted(job.groups.items() if job else ())
                if g.stage in (Stage.FAILED, Stage.CANCELLED)
            ]

    def prompts_of(self, job_id: str, index: int) -> Prompts | None:
        with self._lock:
            job = self._jobs.get(job_id)
            group = job.groups.get(index) if job else None
            return group.prompts if group else None
