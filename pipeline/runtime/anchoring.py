"""Anchors the logs of published jobs: at once, and later those that were missed.

A worker may die between the publication and the anchor, or the anchors' place or the time stamp
authority may be out of reach just then. Workers look for such jobs while they run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.anchors import Anchors
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.errors import SpecbatchError
from specbatch.schemas.records import JobRow
from specbatch.schemas.refusals import is_news

log = logging.getLogger(__name__)

INTERVAL_SEC = 300.0  # between two searches for logs without an anchor
MOST_JOBS = 100  # the newest ones, which are searched
MOST_AGE_SEC = 86_400.0  # since a job ended; later `specbatch audit --anchor` anchors its log
_CLOSE_SEC = 5.0  # to wait for a place that does not answer
_NEXT = "this worker tries again"


class Anchoring:
    """Once it is started, it also searches, in a thread of its own."""

    def __init__(
        self,
        store: Store,
        anchors: Anchors,
        interval_sec: float = INTERVAL_SEC,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._anchors = anchors
        self._interval_sec = interval_sec
        self._clock = clock
        self._done: set[tuple[str, float | None]] = set()  # jobs with an anchor, and their ends
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="anchoring", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SEC)

    def published(self, job_id: str) -> None:
        """Anchor the log of a job that was published, which stays so where that does not work."""
        try:
            self._anchors.put(job_id, self._store.log_head(job_id))
        except SpecbatchError as error:
            log.warning(
                "job %s is published and its log is not anchored: %s; `specbatch audit %s "
                "--anchor` tries again",
                *(job_id, error, job_id),
                extra={"job": job_id},
            )

    def catch_up(self) -> list[str]:
        """Anchor the logs that have no anchor of their publication; the jobs' ids.

        Raises what the store, the anchors' place and the authority raise: the others can wait.
        """
        oldest, anchored = self._clock() - MOST_AGE_SEC, []
        ended = {
            _key(job)
            for job in self._store.list_jobs(MOST_JOBS)
            if job.state.is_final and (job.finished_at or 0.0) >= oldest
        }
        self._done &= ended
        for job_id, finished_at in sorted(ended - self._done, key=str):
            if self._stop.is_set():
                break
            if self._is_missed(job_id):
                self._anchors.put(job_id, self._store.log_head(job_id))
                log.warning(
                    "job %s was published without an anchor; now its log has one",
                    job_id,
                    extra={"job": job_id},
                )
                anchored.append(job_id)
            self._done.add((job_id, finished_at))
        return anchored

    def _is_missed(self, job_id: str) -> bool:
        """Whether a publication is behind all that is anchored."""
        later = self._store.log(job_id, self._anchors.last_number(job_id))
        return any(entry.kind == EntryKind.PUBLISHED for entry in later)

    def _run(self) -> None:
        while True:
            try:
                self.catch_up()
            except SpecbatchError as error:
                if is_news(error):
                    log.warning(
                        "could not anchor the logs that lack an anchor: %s; %s", error, _NEXT
                    )
            except Exception:
                if not self._stop.is_set():  # else the store is closed
                    log.exception("could not anchor the logs that lack an anchor; %s", _NEXT)
            if self._stop.wait(self._interval_sec):
                return


def _key(job: JobRow) -> tuple[str, float | None]:
    return job.job_id, job.finished_at
