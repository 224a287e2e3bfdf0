"""This process's wall clock, as wrong as a host's may be. The monotonic one is as it is.

Whoever reads the time by one of the names of `time.time` reads it here once it was set: what
modules have imported by name is replaced, too. Files and other processes have the true time.
"""

from __future__ import annotations

import sys
import time

_time, _time_ns = time.time, time.time_ns
_ahead_ns = 0
_is_ours = False


def set_ahead(seconds: float) -> None:
    """Be so much ahead of the true time from now on; less than nothing: behind."""
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
