"""The clock by which engines measure themselves, in units of 100 nanoseconds."""

from __future__ import annotations

import time


def now() -> int:
    """100-ns units of the performance counter."""
    return time.perf_counter_ns() // 100
