"""The jobs of `MemoryStore`, and how they are looked up by name and by lease."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.memory.units import Group, Job, Unit
from specbatch.schemas.errors import JobNotFoundError
from specbatch.schemas.records import JobRow, Lease, Stage


class JobsInMemory:
    """What the store's methods, here and in the classes built on this, work on."""

    def __init__(
        self,
        max_attempts: int = 3,
        clock: Callable[[], float] = time.time,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._max_attempts = max_attempts
        self._now = clock
        self._lock = threading.RLock()
        self._jobs: dict[str, Job] = {}
        self._weights = dict(weights or {})  # of tenants
        self._tenants: dict[str, tuple[float, float]] = {}  # served, started

    def _job(self, job_id: str) -> Job:
        if job_id in self._jobs:
            return self._jobs[job_id]
        found = [i for i in self._jobs if len(job_id) >= 6 and i.startswith(job_id)]
        if problem := rules.find_by_prefix(job_id, found):
            raise JobNotFoundError(problem)
        return self._jobs[found[0]]

    def _row(self, job: Job) -> JobRow:
        return replace(job.row, stage=job.stage, paused=job.waits, last_error=job.last_error)

    def _unit(self, lease: Lease) -> Unit | None:
        job = self._jobs.get(lease.job_id)
        if job is None or lease.group_index is None:
            return job
        return job.groups.get(lease.group_index)

    def _held_job(self, lease: Lease) -> Job:
        unit = self._unit(lease)
        if not isinstance(unit, Job) or not unit.is_held_by(lease):
            raise rules.fenced(lease)
        return unit

    def _held_group(self, lease: Lease) -> Group:
        unit = self._unit(lease)
        if not isinstance(unit, Group) or not unit.is_held_by(lease):
            raise rules.fenced(lease)
        return unit

    def _stage_without_lease(self, job: Job, group: Group) -> Stage:
        return rules.stage_without_lease(
            group.stage, group.attempts, self._max_attempts, job.row.cancel_requested
        )
