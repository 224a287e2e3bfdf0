"""When a job ends, from the tokens that were seen of it so far.

The speed is the mean over the later half of what was seen, or over more of it where there were few
changes. Only changes count: another machine's tokens arrive in bursts, one for each committed
group, and say nothing between two of them. The range is that of the estimates since half of the
time, and a margin.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

MARGIN = 0.1  # of the time left: what the spread of earlier estimates does not show
LEAST = 8  # changes that a speed rests on, if there are as many
POINTS = 256  # kept at most; then every other one


class Left(NamedTuple):
    """Seconds that a job still takes, and the range in which it most likely ends."""

    sec: float
    low: float
    high: float


@dataclass(slots=True)
class Forecast:
    """Estimates the end of one job. Times are seconds on one clock."""

    _begun: tuple[float, float] | None = None  # time and tokens when it was first seen
    _changes: deque[tuple[float, float]] = field(default_factory=deque)  # time, tokens from then on
    _ends: deque[tuple[float, float]] = field(default_factory=deque)  # time, the end as told then

    def see(self, now: float, tokens: float) -> None:
        """Note how many tokens there are."""
        if self._begun is None:
            self._begun = (now, tokens)
        elif tokens != (self._changes[-1] if self._changes else self._begun)[1]:
            self._changes.append((now, tokens))
            _thin(self._changes)

    def left(self, now: float, to_come: float, unsure: float = 0.0) -> Left | None:
        """What is left of the job with `to_come` tokens; None while no speed is known. `unsure` is
        the error of `to_come`, as a share of it."""
        speed = self._speed()
        if not speed:
            return None
        end = max(self._changes[-1][0] + to_come / speed, now)
        self._ends.append((now, end))
        _thin(self._ends)
        return self._ranged(now, end, unsure)

    def _speed(self) -> float | None:
        """Tokens per second. One change alone is measured from the beginning, which includes the
        loading of models."""
        if not self._changes or self._begun is None:
            return None
        last_at, last = self._changes[-1]
        first_at = self._changes[0][0]
        since, before = self._begun if last_at == first_at else self._changes[0]
        for at, tokens in islice(self._changes, max(len(self._changes) - LEAST, 0)):
            if at <= (first_at + last_at) / 2:
                since, before = at, tokens
        return (last - before) / (last_at - since) if last_at > since else None

    def _ranged(self, now: float, end: float, unsure: float) -> Left:
        middle = (self._ends[0][0] + now) / 2
        ends = [told for at, told in self._ends if at >= middle]
        margin = (MARGIN + unsure) * (end - now)
        return Left(end - now, max(min(ends) - margin - now, 0.0), max(ends) + margin - now)


def _thin(points: deque[tuple[float, float]]) -> None:
    """Leave out every other point of too many, but neither the first nor the last."""
    if len(points) > POINTS:
        kept = [*list(points)[:-1:2], points[-1]]
        points.clear()
        points.extend(kept)
