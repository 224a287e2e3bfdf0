"""Refused writes: errors that are the fault of a disk, a quota or a mount, and of no work.

Many threads of a process meet the same one again and again, so each place is logged once a minute.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable

from specbatch.schemas.errors import ObjectError, SpecbatchError

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
# What to do about them; whoever reads the error may not be who runs the worker.
FREE_SPACE = "free space there"
FREE_SPACE_OR_QUOTA = f"{FREE_SPACE}, or raise this user's quota"
CHECK_DISK = "check that disk"
REMEDIES = {
    errno.ENOSPC: FREE_SPACE,
    errno.EDQUOT: FREE_SPACE_OR_QUOTA,
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`)",
    errno.EROFS: "let it be written again (`mount -o remount,rw`)",
    errno.EIO: CHECK_DISK,
    **dict.fromkeys(RIGHTS, "let the worker's user write there"),
}
_MOST_PLACES = 256  # that a process tells of in one minute


class News:
    """Tells whether a refusal is to be logged now. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_at: dict[str, float] = {}  # by place, of the last minute
        self._lock = threading.Lock()

    def __call__(self, error: SpecbatchError) -> bool:
        """True for all other errors; of refused writes for one a minute and place."""
        if not error.refused:
            return True
        place = _place_of(error)
        with self._lock:
            now = self._clock()
            self._told_at = {
                one: at for one, at in self._told_at.items() if now - at < TELL_EVERY_SEC
            }
            if place in self._told_at or len(self._told_at) >= _MOST_PLACES:
                return False
            self._told_at[place] = now
            return True


def _place_of(error: SpecbatchError) -> str:
    """The folder of the file that refuses, or the store, of which a process has one."""
    place = error.place if isinstance(error, ObjectError) else ""
    return place.rpartition("/")[0]


is_news = News()
