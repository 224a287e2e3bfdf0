"""Work messages for groups of another numeric class or fingerprint go back to the queue.

Workers of all of them share the queue of their model, so one may take a message for a group that it
must not verify. The message would be lost until the sweeper misses it, while workers that may stand
idle. It is sent again, slowly: else two workers could pass it to and fro thousands of times.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.client import Ring
from specbatch.schemas.errors import JobNotFoundError
from specbatch.schemas.numeric_class import Pinned, Serves
from specbatch.schemas.records import Bell, Stage

log = logging.getLogger(__name__)

PACE_SEC = 0.5  # between two messages of one process
FRESH_SEC = 5.0  # for which the list of live workers is not read anew


class PassingOn:
    """Sends such messages again while a live worker of their class is there. Thread-safe."""

    def __init__(
        self,
        store: Store,
        ring: Ring,
        silence_sec: float,
        pace_sec: float = PACE_SEC,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Workers that were not heard of for `silence_sec` are held for dead."""
        self._store = store
        self._ring = ring
        self._silence_sec = silence_sec
        self._pace_sec = pace_sec
        self._clock = clock
        self._lock = threading.Lock()  # held while a message waits: that makes the pace
        self._waiting: set[str] = set()  # ids of jobs that no live worker may verify
        self._read_at = -FRESH_SEC

    def pass_on(self, job_id: str, serves: Serves) -> None:
        """A worker that serves this took a message for a group of the job, and claimed nothing."""
        try:
            job = self._store.get_job(job_id)
        except JobNotFoundError:
            return
        if serves.takes(Pinned.of(job)):
            return
        with self._lock:
            due = [bell for bell in self._due(job_id) if not self._is_waiting(job_id)]
            if due:
                time.sleep(self._pace_sec)
                log.debug("passed on: %s, of another class or model", due[0])
                self._ring(due[0])

    def _due(self, job_id: str) -> list[Bell]:
        """A group of the job that is free to be verified: whichever it is, its turn decides."""
        return [b for b in self._store.due(limit=1, job_id=job_id) if b.stage is Stage.VERIFY]

    def _is_waiting(self, job_id: str) -> bool:
        """Whether nobody alive may verify the job: then the sweeper's messages are enough."""
        if self._clock() - self._read_at >= FRESH_SEC:
            self._waiting = set(self._store.backlog().waiting(self._silence_sec))
            self._read_at = self._clock()
        return job_id in self._waiting
