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

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.policy import placement
from specbatch.pipeline.policy.placement import Choice, Pool, Work
from specbatch.schemas.backlog import OpenJob, WorkerNow
from specbatch.schemas.placement import SPOT
from specbatch.schemas.timekeeping import Device

log = logging.getLogger(__name__)

FRESH_SEC = 5.0  # for which an answer holds, at most


def pool_of(device: Device) -> Pool:
    return Pool(device.pool, device.price_microusd, device.tenure == SPOT)


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
        self._lock = threading.Lock()
        self._read_at = -float("inf")
        self._jobs: frozenset[str] | None = frozenset()
        self._said: dict[str, Choice] = {}

    def jobs(self) -> frozenset[str] | None:
        """The ids of jobs whose groups this worker may verify now; None: any. Raises `StoreError`.

        A job that came after the last reading is not among them until the next.
        """
        with self._lock:
            if self._clock() - self._read_at >= self._fresh_sec:
                self._jobs = self._read()
                self._read_at = self._clock()
            return self._jobs

    def leaves(self, job_id: str) -> bool:
        """Whether a job is left to others, by the last reading."""
        return self._jobs is not None and job_id not in self._jobs

    def _read(self) -> frozenset[str] | None:
        alive = self._store.alive(self._silence_sec)
        workers = [one for one in alive.verifying() if one.serves is not None]
        prices = {pool_of(one.device)[1:] for one in workers}
        if prices <= {self._here[1:]}:
            return None  # all are alike
        if not self._here.is_spot and min(prices)[0] >= self._here.price_microusd:
            return None  # no pool is cheaper
        works = [_work(job, workers) for job in self._store.open_jobs()]
        choices = placement.choose(alive.at, self._here, works, self._patience_sec, self._weights)
        self._tell(choices)
        return frozenset(job_id for job_id, choice in choices.items() if choice.takes)

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


def _work(job: OpenJob, workers: list[WorkerNow]) -> Work:
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
        moved_at=job.moved_at,
        devices=Counter(pool_of(one.device) for one in able),
    )
