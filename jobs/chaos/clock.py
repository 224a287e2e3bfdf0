"""Sets this process's wall clock wrong, as on a misconfigured host. Leaves the monotonic clock.

Once set, all callers of `time.time` read the wrong time; functions that modules have imported by
name are replaced too. Files and other processes keep the true time.
"""

from __future__ import annotations

import sys
import time

_time, _time_ns = time.time, time.time_ns
_ahead_ns = 0
_is_ours = False


def set_ahead(seconds: float) -> None:
    """From now on be so many seconds ahead of the true time, or behind if negative."""
    global _ahead_ns
    _ahead_ns = round(seconds * 1e9)
    if seconds and not _is_ours:
        _take_over()


def wrong_time() -> float:
    return _time() + _ahead_ns / 1e9


def wrong_time_ns() -> int:
    return _time_ns() + _ahead_ns


def _take_over() -> None:
    global _is_ours
    _is_ours = True
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if module is not sys.modules[__name__] and value is _time:
                setattr(module, name, wrong_time)
            elif module is not sys.modules[__name__] and value is _time_ns:
                setattr(module, name, wrong_time_ns)
