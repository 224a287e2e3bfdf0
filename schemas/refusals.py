"""Refused writes: errors that are the fault of a disk, a quota or a mount, and of no work.

Many threads of a process meet the same one again and again, so it is told once a minute.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable

TELL_EVERY_SEC = 60.0

# No space, over a quota, a file too long, read-only, not allowed, a broken disk.
REFUSALS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        *(errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
    }
)
# Of these, what lies with one folder's rights, which do not change by themselves.
RIGHTS = frozenset({errno.EACCES, errno.EPERM})


def refuses_writes(error: BaseException) -> bool:
    """Whether the place that an error of ours names refuses to be written."""
    return bool(getattr(error, "refused", False))


class News:
    """Tells whether a refusal is to be logged now. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_at: float | None = None
        self._lock = threading.Lock()

    def __call__(self, error: BaseException) -> bool:
        """True for all other errors; of refused writes for one a minute in the whole process."""
        if not refuses_writes(error):
            return True
        with self._lock:
            now = self._clock()
            if self._told_at is not None and now - self._told_at < TELL_EVERY_SEC:
                return False
            self._told_at = now
            return True


is_news = News()
