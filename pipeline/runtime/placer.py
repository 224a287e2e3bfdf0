"""Which jobs this worker may claim now, by the prices of the pools that are alive.

`policy/placement.py` decides. This reads what it decides by: the workers' heartbeats, and, where
prices differ, what is left of live jobs. An answer holds for some seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.policy import placement
from specbatch.pipeline.policy.placement import Choice, Pool, Work
from specbatch.schemas.backlog import OpenJob, WorkerNow
from specbatch.schemas.placement import SPOT
from specbatch.schemas.timekeeping import Device

log = logging.getLogger(__name__)

FRESH_SEC = 5.0  # for which an answer holds, if reading took no time
REST = 20  # times as long as reading took does an answer hold, so that reading is a small share …
MOST_FRESH = 12  # … but no longer than so many times `FRESH_SEC`


def pool_of(device: Device) -> Pool:
    return Pool(device.pool, device.each_microusd, device.tenure == SPOT)


class Overdue(NamedTuple):
    """A job that nobody had continued for too long."""

    moved_at: float  # its last progress before this pool took it
    until: float  # when cheaper pools are waited for again


class Placer:
    """Answers for one worker process that verifies. Thread-safe."""

    def __init__(
        self,
        store: Store,
        device: Device,
        silence_sec: float,
        patience_sec: float,
        weights: Mapping[str, float],
        fresh_sec: float = FRESH_SEC,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Workers that were not heard of for `silence_sec` count as dead. `weights` are the
        tenants' shares."""
        self._store = store
        self._here = pool_of(device)
        self._silence_sec = silence_sec
        self._patience_sec = patience_sec
        self._weights = weights
        self._fresh_sec = fresh_sec
        self._clock = clock
        self._reading = threading.Lock()
        self._holds_until: float | None = None  # None: nothing was read yet
        self._jobs: frozenset[str] | None = frozenset()
        self._said: dict[str, Choice] = {}
        self._overdue: dict[str, Overdue] = {}

    def jobs(self) -> frozenset[str] | None:
        """The ids of jobs whose groups this worker may verify now; None: any. Raises `StoreError`.

        A job that came after the last reading is not among them until the next. While one thread
        reads, others get the answer before; only the first one is waited for.
        """
        if self._is_old() and self._reading.acquire(blocking=self._holds_until is None):
            try:
                if self._is_old():  # nobody else has read meanwhile
                    self._renew()
            finally:
                self._reading.release()
        return self._jobs

    def _is_old(self) -> bool:
        return self._holds_until is None or self._clock() >= self._holds_until

    def _renew(self) -> None:
        began_at = self._clock()
        self._jobs = self._read()
        now = self._clock()
        longer = min(REST * (now - began_at), MOST_FRESH * self._fresh_sec)
        self._holds_until = now + max(self._fresh_sec, longer)

    def leaves(self, job_id: str) -> bool:
        """Whether a job is left to others, by the last reading."""
        return self._jobs is not None and job_id not in self._jobs

    def _read(self) -> frozenset[str] | None:
        alive = self._store.alive(self._silence_sec)
        workers = [one for one in alive.verifying() if one.serves is not None]
        if not any(pool_of(one.device).may_get_from(self._here) for one in workers):
            return None
        jobs = self._store.open_jobs()
        self._note_overdue(jobs, alive.at)
        works = [_work(job, workers, self._moved_at(job)) for job in jobs]
        choices = placement.choose(alive.at, self._here, works, self._patience_sec, self._weights)
        self._tell(choices)
        return frozenset(job_id for job_id, choice in choices.items() if choice.takes)

    def _note_overdue(self, jobs: list[OpenJob], now: float) -> None:
        """Note the jobs that this pool takes because cheaper pools did nothing for them.

        Its own first group would count as progress, and it would leave the job again. So for as
        long as it has waited, the last progress before that group counts.
        """
        overdue = {}
        for job in jobs:
            known = self._overdue.get(job.pinned.job_id)
            if known is not None and now < known.until:
                overdue[job.pinned.job_id] = known
            elif now - job.moved_at >= self._patience_sec:
                overdue[job.pinned.job_id] = Overdue(job.moved_at, now + self._patience_sec)
        self._overdue = overdue

    def _moved_at(self, job: OpenJob) -> float:
        known = self._overdue.get(job.pinned.job_id)
        return job.moved_at if known is None else known.moved_at

    def _tell(self, choices: dict[str, Choice]) -> None:
        """Log what has changed."""
        for job_id, choice in choices.items():
            if self._said.get(job_id) != choice:
                what = "takes" if choice.takes else "leaves"
                about = {"job": job_id}
                log.info(
                    "pool %s %s job %s: %s", self._here.name, what, job_id, choice.why, extra=about
                )
        self._said = choices


def _work(job: OpenJob, workers: list[WorkerNow], moved_at: float) -> Work:
    able = [one for one in workers if job.pinned.may_be_verified_by(one)]
    return Work(
        job_id=job.pinned.job_id,
        tenant=job.tenant,
        priority=job.priority,
        created_at=job.created_at,
        deadline_at=job.deadline_at,
        rows=job.rows,
        is_read=job.is_read,
        sec_per_row=job.sec_per_row,
        group_rows=job.group_rows,
        moved_at=moved_at,
        devices=Counter(pool_of(one.device) for one in able),
    )
