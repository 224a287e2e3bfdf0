"""What is done with times that are due: pure functions of the policies in a schedule's file."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from specbatch.jobs.schedules.definition import CatchUp, Overlap

MOST_HELD = 1000  # of an outage's times that may still be run
MOST_TOLD = 100  # that get a row each when they were missed


@dataclass(frozen=True, slots=True)
class Due:
    """Times that are due and have no row yet, in order."""

    times: Sequence[float]  # the newest `MOST_HELD` of them
    earlier: int = 0  # how many came before those ...
    first: float | None = None  # ... and when the first did


def due(times: Iterable[float], now: float) -> Due:
    """Those of `times` that have come."""
    newest: deque[float] = deque(maxlen=MOST_HELD)
    count, first = 0, None
    for at in takewhile(lambda at: at <= now, times):
        count, first = count + 1, at if first is None else first
        newest.append(at)
    earlier = count - len(newest)
    return Due(tuple(newest), earlier, first if earlier else None)


def to_run(
    times: Sequence[float], now: float, catch_up: CatchUp, limit: int, grace_sec: float
) -> Sequence[float]:
    """Which of the due times are run; the others were missed.

    none     the newest, if it is still on time
    latest   the newest
    all      the newest `limit`
    """
    if catch_up == "all":
        return times[-limit:]
    newest = times[-1:]
    if catch_up == "none" and newest and now - newest[0] > grace_sec:
        return ()
    return newest


class Meeting(StrEnum):
    """What becomes of times that are to be run while an older run is at work or waits."""

    WAIT = "wait"
    SKIP = "skip"
    REPLACE = "replace"  # the older runs end


def meeting(overlap: Overlap, is_busy: bool) -> Meeting:
    """Times that are caught up together always wait for each other: they never met by plan."""
    if not is_busy or overlap == "queue":
        return Meeting.WAIT
    return Meeting.SKIP if overlap == "skip" else Meeting.REPLACE
