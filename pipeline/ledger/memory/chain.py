"""The audit log and audits of `MemoryStore`: the twin of `chain.py` and `audit_reading.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from specbatch.pipeline.audit import entries
from specbatch.pipeline.audit.digests import KEPT_BYTES
from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.actor import whoami
from specbatch.pipeline.ledger.memory.jobs import JobsInMemory
from specbatch.pipeline.ledger.memory.units import Job
from specbatch.schemas.audit import (
    EMPTY,
    AuditRecord,
    Correctness,
    EntryKind,
    Head,
    KeptCompletion,
    LogEntry,
)
from specbatch.schemas.errors import JobNotFoundError
from specbatch.schemas.mapper import as_kept
from specbatch.schemas.records import CompletionRecord, JobState, Lease, Prompts


class ChainInMemory(JobsInMemory):
    """What every job's log says, and what it pins."""

    def __init__(
        self,
        max_attempts: int = 3,
        clock: Callable[[], float] = time.time,
        weights: Mapping[str, float] | None = None,
        actor: str | None = None,
    ) -> None:
        super().__init__(max_attempts, clock, weights)
        self._actor = actor or whoami()
        self._audits: list[AuditRecord] = []

    def _say(
        self, job: Job, kind: EntryKind, payload: Mapping[str, Any], actor: str | None = None
    ) -> None:
        """Add an entry to the job's log."""
        head = job.log[-1].head if job.log else EMPTY
        job.log.append(
            entries.follow(head, job.row.job_id, kind, self._now(), actor or self._actor, payload)
        )

    def _record(
        self,
        job: Job,
        lease: Lease,
        generation: int,
        kind: EntryKind,
        completions: Sequence[CompletionRecord],
    ) -> None:
        """Keep a group's completions, those that are there already left out, and say so."""
        assert lease.group_index is not None, "else it would have been fenced"
        digested = entries.digested(completions)
        for record, digest in digested:
            key = (record.row_index, record.sample_index)
            job.completions.setdefault(key, as_kept(record))
            job.digests.setdefault(key, (lease.group_index, digest[:KEPT_BYTES]))
        said = entries.completed(lease.group_index, generation, digested)
        self._say(job, kind, said, lease.owner)

    def _fail(self, job: Job, error: str | None, actor: str | None = None) -> None:
        """End the job without an output."""
        said = entries.ended(JobState.FAILED.value, error)
        self._say(job, EntryKind.FAILED, said, actor)
        job.end(JobState.FAILED, error, self._now())

    def note_action(self, job_id: str, kind: EntryKind, payload: Mapping[str, Any]) -> Head:
        with self._lock:
            job = self._job(job_id)
            self._say(job, kind, payload)
            return job.log[-1].head

    def log(
        self,
        job_id: str,
        after: int = 0,
        batch: int = 64,  # noqa: ARG002 - nothing to page
    ) -> Iterator[LogEntry]:
        with self._lock:
            job = self._jobs.get(job_id)
            return iter(job.log[after:] if job else [])

    def log_head(self, job_id: str) -> Head:
        with self._lock:
            job = self._jobs.get(job_id)
            return job.log[-1].head if job and job.log else EMPTY

    def logged_job(self, job_id: str) -> str:
        with self._lock:
            found = [i for i in self._jobs if i == job_id]
            if not found and len(job_id) >= rules.MIN_PREFIX:
                found = [i for i in self._jobs if i.startswith(job_id)]
            if problem := rules.find_by_prefix(job_id, found):
                raise JobNotFoundError(problem)
            return found[0]

    def job_facts(self, job_id: str) -> Mapping[str, Any] | None:
        with self._lock:
            job = self._jobs.get(job_id)
            return None if job is None else asdict(job.row)

    def kept(
        self,
        job_id: str,
        batch: int = 500,  # noqa: ARG002 - nothing to page
    ) -> Iterator[KeptCompletion]:
        with self._lock:
            job = self._jobs.get(job_id)
            return iter(
                [
                    KeptCompletion(*key, *job.digests[key], record)
                    for key, record in sorted(job.completions.items())
                ]
                if job
                else []
            )

    def kept_one(self, job_id: str, row: int, sample: int) -> KeptCompletion | None:
        with self._lock:
            return next(
                (k for k in self.kept(job_id) if (k.row_index, k.sample_index) == (row, sample)),
                None,
            )

    def groups(self, job_id: str) -> Iterator[tuple[int, Prompts]]:
        with self._lock:
            job = self._jobs.get(job_id)
            return iter([(i, g.prompts) for i, g in sorted(job.groups.items())] if job else [])

    def keep_audit(self, audit: AuditRecord) -> None:
        with self._lock:
            self._audits.append(replace(audit, at=self._now(), actor=self._actor))

    def audits(self, job_id: str) -> list[AuditRecord]:
        with self._lock:
            mine = [audit for audit in self._audits if audit.job_id == job_id]
            return sorted(mine, key=lambda audit: audit.at)

    def correctness(self, since: float = 0.0) -> Correctness:
        with self._lock:
            late = [audit for audit in self._audits if audit.at >= since]
            return Correctness(sum(a.sampled for a in late), sum(a.differing for a in late))
