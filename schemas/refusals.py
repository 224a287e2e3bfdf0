"""Refused writes: errors of a disk, a quota or a mount, for which no work is at fault.

Many threads of a process meet the same error again and again, so each place is logged once a
minute.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable

from specbatch.schemas.errors import ObjectError, SpecbatchError

LOG_EVERY_SEC = 60.0

# No space, over a quota, a file too long, read-only, not allowed, a broken disk.
REFUSALS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        *(errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
    }
)
# Of these, what lies with one folder's rights, which do not change by themselves.
RIGHTS = frozenset({errno.EACCES, errno.EPERM})
# The remedies. The reader of the error may not be the one who runs the worker.
FREE_SPACE = "free space there"
FREE_SPACE_OR_QUOTA = f"{FREE_SPACE}, or raise this user's quota"
CHECK_DISK = "check that disk"
REMEDIES = {
    errno.ENOSPC: FREE_SPACE,
    errno.EDQUOT: FREE_SPACE_OR_QUOTA,
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`)",
    errno.EROFS: "make it writable again (`mount -o remount,rw`)",
    errno.EIO: CHECK_DISK,
    **dict.fromkeys(RIGHTS, "let the worker's user write there"),
}
_MOST_PLACES = 256  # that a process logs in one minute


class RefusalLog:
    """Decides whether to log a refusal now. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}  # by place, of the last minute
        self._lock = threading.Lock()

    def __call__(self, error: SpecbatchError) -> bool:
        """True for other errors, and once a minute for each place that refuses writes."""
        if not error.refused:
            return True
        place = _place_of(error)
        with self._lock:
            now = self._clock()
            self._logged_at = {
                one: at for one, at in self._logged_at.items() if now - at < LOG_EVERY_SEC
            }
            if place in self._logged_at or len(self._logged_at) >= _MOST_PLACES:
                return False
            self._logged_at[place] = now
            return True


def _place_of(error: SpecbatchError) -> str:
    """The folder of the file that cannot be written, or the process's one store."""
    place = error.place if isinstance(error, ObjectError) else ""
    return place.rpartition("/")[0]


should_log = RefusalLog()
