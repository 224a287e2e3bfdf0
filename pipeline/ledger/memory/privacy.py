"""The end of what is kept of texts, in memory: the twin of `purging.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.memory.chain import ChainInMemory
from specbatch.pipeline.ledger.privacy_contract import MOST_JOBS
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.records import Artefact, CompletionRecord, JobRow, Prompts, Stage


class PrivacyInMemory(ChainInMemory):
    """Between the jobs and the rest of the store."""

    def recorded_groups(self, job_id: str) -> list[tuple[int, Prompts, Artefact | None]]:
        with self._lock:
            job = self._jobs.get(job_id)
            found = [
                (index, g.prompts, g.results if g.stage is Stage.DONE else None)
                for index, g in (job.groups.items() if job else ())
                if g.stage is Stage.DONE or g.rows_kept
            ]
            return sorted(found, key=lambda group: rules.row_order(group[1]))

    def ended_jobs(
        self,
        age_sec: float,
        tenant: str | None = None,
        limit: int = MOST_JOBS,
        private_only: bool = False,
        after: JobRow | None = None,
    ) -> list[JobRow]:
        with self._lock:
            before = self._now() - age_sec
            found = [
                self._row(job)
                for job in self._jobs.values()
                if job.row.state.is_final and tenant in (None, job.row.tenant)
                if job.row.purged_at is None or job.purged_to is not None
                if not (private_only and job.row.privacy.is_full)
            ]
            ended = [row for row in found if _place(row)[0] <= before]
            if after is not None:
                ended = [row for row in ended if _place(row) > _place(after)]
            return sorted(ended, key=_place)[:limit]

    def purge(
        self, job_id: str, why: str, batch_rows: int = 1000, unfinished: bool = False
    ) -> Iterator[int]:
        with self._lock:
            job = self._job(job_id)
            rules.check_purge(job.row)
            if job.row.purged_at is None:
                job.update(purged_at=self._now())
                job.purged_to, job.last_error = 0, None
                for group in job.groups.values():
                    group.last_error = None
                self._say(job, EntryKind.PURGED, {"rows": None, "why": why, "output": False})
        if job.purged_to is not None:
            yield job.purged_to
        while job.purged_to is not None:
            with self._lock:
                begin, after = job.purged_to, job.purged_to + batch_rows
                for key, record in job.completions.items():
                    if begin <= key[0] < after:
                        job.completions[key] = _emptied(record)
                for index, row in job.rejected.items():
                    if begin <= index < after:
                        job.rejected[index] = replace(row, row_id=None, reason="")
                is_last = after >= job.next_row
                job.purged_to = after if not is_last else job.next_row if unfinished else None
            yield min(after, job.next_row)
            if is_last:
                return


def _place(job: JobRow) -> tuple[float, str]:
    """Of an ended job among others."""
    return (math.inf if job.finished_at is None else job.finished_at), job.job_id


def _emptied(record: CompletionRecord) -> CompletionRecord:
    return replace(
        record,
        row_id="",
        text="",
        token_ids=(),
        logprobs=(),
        top_logprobs=None,
        error=None,
        provenance=replace(record.provenance, rejected=()),
    )
