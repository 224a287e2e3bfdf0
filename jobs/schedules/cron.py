"""Computes the times of a cron expression in a time zone, across daylight-saving changes.

cronsim says which wall-clock times an expression names; which instants those are is decided here.

    hours named (30 2 * * *, 0 */6 * * *)   each wall-clock time once: a skipped time comes right
                                            after the change, a doubled time at its first occurrence
    every hour (0 * * * *, */15 * * * *)    as the clock shows it: none in a skipped hour, and both
                                            of a doubled one
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from specbatch.schemas.errors import UsageError

_NAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_LONGEST_REPEAT = timedelta(hours=4)  # no zone ever moved its clocks back by more than three
_EVERY_HOUR = 24
_MINUTE = timedelta(minutes=1)


class CronTimes:
    """When a cron expression is due."""

    def __init__(self, expression: str, zone: ZoneInfo) -> None:
        """Raises `UsageError` for an invalid expression, or one that never comes."""
        given = _NAMES.get(expression.strip().lower(), expression)
        if len(given.split()) != 5:
            raise UsageError(
                f"{expression!r} is not a cron expression: write five fields (minute hour "
                "day-of-month month day-of-week), or @daily and its like"
            )
        try:
            hours = CronSim(given, datetime(2000, 1, 1)).hours
            next(CronSim(given, datetime(2000, 1, 1)))
        except CronSimError as error:
            problem = str(error).removeprefix("Bad ")
            raise UsageError(f"{expression!r} is not a cron expression: wrong {problem}") from None
        except StopIteration:
            raise UsageError(
                f"cron expression {expression!r} names no time that ever comes"
            ) from None
        self._expression = given
        self._every_hour = len(hours) == _EVERY_HOUR
        self.zone = zone

    def after(self, start: float) -> Iterator[float]:
        """The times later than `start`, in order, each once; seconds since the epoch."""
        local = datetime.fromtimestamp(start, self.zone).replace(tzinfo=None)
        if self._every_hour:
            return self._as_shown(start, local - _LONGEST_REPEAT)
        return self._once_each(start, local)

    def instant(self, wall: datetime) -> float:
        """The instant of a wall-clock time: the first of two, or right after a change skips it."""
        return _first_instant(wall.replace(second=0, microsecond=0), self.zone)

    def local(self, at: float) -> datetime:
        """The wall-clock time in the zone."""
        return datetime.fromtimestamp(at, self.zone)

    def _once_each(self, start: float, local: datetime) -> Iterator[float]:
        """Each wall-clock time once. Their instants never go back, so the order is kept."""
        last = start
        for wall in CronSim(self._expression, local.replace(microsecond=0)):
            at = _first_instant(wall, self.zone)
            if at > last:  # of several times that one change skips, yield one
                last = at
                yield at

    def _as_shown(self, start: float, local: datetime) -> Iterator[float]:
        """All instants as the clock shows them. Those of a repeated hour wait for their turn."""
        waiting: list[float] = []
        for wall in CronSim(self._expression, local.replace(microsecond=0)):
            nothing_before = _first_instant(wall, self.zone)
            while waiting and waiting[0] < nothing_before:
                yield heapq.heappop(waiting)
            for at in _instants(wall, self.zone):
                if at > start:
                    heapq.heappush(waiting, at)


def _instants(wall: datetime, zone: ZoneInfo) -> Iterator[float]:
    """The instants at which clocks in the zone show this time: none, one or two."""
    found = set()
    for fold in (0, 1):
        at = wall.replace(tzinfo=zone, fold=fold)
        if at.astimezone(UTC).astimezone(zone).replace(tzinfo=None) == wall:
            found.add(at.timestamp())
    yield from sorted(found)


def _first_instant(wall: datetime, zone: ZoneInfo) -> float:
    """The first instant at which clocks show this time, or have just skipped it."""
    while (at := next(_instants(wall, zone), None)) is None:
        wall += _MINUTE
    return at
