"""What a process announces of its models, without making a heartbeat wait for their files.

To find out what lies in a model's folder may mean to digest a hundred gigabytes, in which leases
would run out. So a thread of its own finds out, and whoever asks gets what was found last.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from specbatch.schemas.numeric_class import Serves

log = logging.getLogger(__name__)


class Announcing:
    """Asks `find` and remembers its last answer. Thread-safe."""

    def __init__(self, find: Callable[[], Serves], wait_sec: float) -> None:
        """`wait_sec`: for an answer, far below a lease. Unchanged files take milliseconds."""
        self._find = find
        self._wait_sec = wait_sec
        self._last: Serves | None = None
        self._finding = False
        self._lock = threading.Lock()

    def __call__(self) -> Serves | None:
        """As it is now, where that is soon known; else as it was last, or None: never yet.

        What is found for a job that is claimed is asked of the engine host itself.
        """
        with self._lock:
            begins, self._finding = not self._finding, True
        if begins:
            found = threading.Event()
            threading.Thread(
                target=self._run, args=(found,), name="announcing", daemon=True
            ).start()
            found.wait(self._wait_sec)
        return self._last

    def _run(self, found: threading.Event) -> None:
        try:
            self._last = self._find()
        except Exception:
            log.exception(
                "could not find out what this worker serves; will retry at the next heartbeat"
            )
        finally:
            with self._lock:
                self._finding = False
            found.set()
