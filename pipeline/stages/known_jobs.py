"""Jobs as this process knows them: a row and its checked spec, read once and not once per group.

A group's work needs only what never changes (spec, tenant, models, workspace) and what is there
before the first group is (the history in the report). State, stage, cancel flag and the rest of the
report go on changing: who needs them reads `fresh`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.crash_points import CrashPoint, reach
from specbatch.schemas.records import JobRow
from specbatch.schemas.spec import JobSpec, spec_of

MOST_KNOWN = 64

Known = tuple[JobRow, JobSpec]


class KnownJobs:
    """Reads jobs from the store and keeps the ones used last. Thread-safe."""

    def __init__(self, store: Store, most: int = MOST_KNOWN) -> None:
        self._store = store
        self._most = most
        self._known: OrderedDict[str, Known] = OrderedDict()  # the one used last is last
        self._lock = threading.Lock()

    def of_group(self, job_id: str) -> Known:
        """For work on a group of the job that was just claimed. Raises `JobNotFoundError`."""
        reach(CrashPoint.LEASE)
        with self._lock:
            known = self._known.get(job_id)
            if known is not None:
                self._known.move_to_end(job_id)
                return known
        known = self._read(job_id)
        with self._lock:
            self._known[job_id] = known
            while len(self._known) > self._most:
                self._known.popitem(last=False)
        return known

    def fresh(self, job_id: str) -> Known:
        """For work on the job itself that was just claimed. Not kept: it is still unfinished."""
        reach(CrashPoint.LEASE)
        return self._read(job_id)

    def _read(self, job_id: str) -> Known:
        job = self._store.get_job(job_id)
        return job, spec_of(job)
