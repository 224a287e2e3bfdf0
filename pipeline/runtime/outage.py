"""Holds work back while a place refuses writes: a full disk, a quota, a read-only mount.

No row and no group is at fault then. Claimed work is given back without using up an attempt, and
nothing else is claimed until the place takes writes again; otherwise each claim would compute a
group in vain. A worker retries ever less often and logs it once a minute; a local run ends instead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from specbatch.schemas.errors import SpecbatchError
from specbatch.schemas.refusals import should_log

log = logging.getLogger(__name__)

Attempts = Mapping[Hashable, Callable[[], object]]

FIRST_SEC = 1.0  # until the first retry; each later wait is twice as long ...
LONGEST_SEC = 60.0  # ... up to this


@dataclass(slots=True)
class _Pause:
    """When the next try is, and how long the wait after that is."""

    until: float = 0.0
    wait_sec: float = 0.0

    def extend(self, now: float) -> None:
        if now >= self.until:  # else it is another task of the same try
            self.wait_sec = min(LONGEST_SEC, max(FIRST_SEC, 2 * self.wait_sec))
            self.until = now + self.wait_sec


@dataclass(slots=True)
class Outage:
    """What this process knows of places that refuse writes. Thread-safe.

    `ends`: the process ends at the first refusal. `refused` then holds the reason, and whoever ends
    the process reports it, so nothing is logged here.
    """

    ends: bool = False
    clock: Callable[[], float] = time.monotonic
    refused: SpecbatchError | None = None  # the last one that is not over
    _pause: _Pause = field(default_factory=_Pause)
    _of_jobs: dict[str, _Pause] = field(default_factory=dict)
    _first: dict[Hashable, Callable[[], object]] = field(default_factory=dict)
    _closed: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _trying: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, error: SpecbatchError, first: Attempts | None = None) -> None:
        """A place that all work here needs has refused.

        The calls in `first` must succeed before anything else is tried; those that are refused are
        tried again. Of several with the same name only one is called.
        """
        with self._lock:
            self.refused = error
            self._pause.extend(self.clock())
            self._first |= first or {}
        if self.ends:
            should_log(error)  # so that nobody else logs it
            self._closed.set()
        elif should_log(error):
            log.error("%s; this worker pauses and retries by itself", error)

    def begin_of_job(self, job_id: str, error: SpecbatchError) -> None:
        """This one job's output refuses writes; other jobs need not wait."""
        if self.ends:
            self.begin(error)
            return
        with self._lock:
            self._of_jobs.setdefault(job_id, _Pause()).extend(self.clock())
        if should_log(error):
            log.error("%s; this worker retries job %s by itself", error, job_id)

    def holds_back(self, job_id: str) -> bool:
        """Whether it is too early to try the job's output again."""
        with self._lock:
            pause = self._of_jobs.get(job_id)
            return pause is not None and self.clock() < pause.until

    def published(self, job_id: str) -> None:
        """The job's output has taken all writes."""
        with self._lock:
            self._of_jobs.pop(job_id, None)

    def wait(self) -> bool:
        """Wait until work may be tried; False if this process ends instead."""
        while not self._closed.is_set():
            with self._lock:
                left = self._pause.until - self.clock() if self.refused is not None else 0.0
            if left > 0:
                self._closed.wait(left)
            elif self._try_again():
                return not self._closed.is_set()
        return False

    def _try_again(self) -> bool:
        """Call what must succeed first; False if some of it was refused once more."""
        with self._trying:
            for name, attempt in list(self._first.items()):
                try:
                    attempt()
                except SpecbatchError as error:
                    if error.refused:
                        self.begin(error)
                        return False
                    log.warning("gave up a deferred release: %s", error)
                with self._lock:
                    self._first.pop(name, None)
            return True

    def over(self) -> None:
        """Work that was tried after the pause has succeeded."""
        with self._lock:
            if self.refused is None or self.clock() < self._pause.until or self._first:
                return
            self.refused, self._pause = None, _Pause()
        if not self.ends:
            log.warning("writes succeed again: this worker resumes")

    def close(self) -> None:
        """Release all threads that wait."""
        self._closed.set()
