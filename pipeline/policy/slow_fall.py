"""Whether the acceptance of a nightly job falls slowly.

A one-sided CUSUM (E. S. Page, Continuous Inspection Schemes, Biometrika 41, 1954) adds up by how
much the nights of the newest three weeks are below a reference, in deviations of one night and less
an allowance. The reference is the best of the four blocks of three weeks before them: a better
proposer raises it, and a new level that stays becomes the reference after twelve weeks. Whole weeks
hold as many weekends as each other. How far nights differ is taken from the nights themselves, as
they differ by more than chance, and so is what is usual on each weekday.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from specbatch.schemas.speculation import AcceptanceDay

# `make bench-slow-falls` chose these by simulation; its results say how often they err.
BLOCK_DAYS = 21  # that are tested, and of each block that may be the reference
BLOCKS = 4  # that may be
LEAST_NIGHTS = 10  # of a block that is the reference
ALLOWANCE = 1.25  # deviations below the reference that a night may be
THRESHOLD = 12.0  # of the sum; what is above is a fall
CEILING = 16.0  # of the sum, so that it ends soon once nights are well again
MOST_DEVIATIONS = 4.0  # that one night counts: a night alone is no slow fall
LEAST_DEVIATION = 0.02  # of the rate: smaller differences are not worth telling
LEAST_TESTED = 200.0  # tokens of a night; with fewer it is left out
MOST_SILENT = 7  # days of too few tokens, after which nothing is known of today
DESIGN = 4.0  # tokens of one sequence are alike: the variance of a night over that of a binomial
_DECILES = 2.0 * statistics.NormalDist().inv_cdf(0.9)  # from the first to the ninth, in deviations


@dataclass(frozen=True, slots=True)
class SlowFall:
    """What the test says of one proposer on rows of one tag, as of the newest night."""

    reference: float  # acceptance of the block that the nights are compared with
    first_day: int  # … and its days
    last_day: int
    deviation: float  # of a night, as a share of the reference
    score: float  # the sum over the newest nights

    @property
    def falls(self) -> bool:
        return self.score > THRESHOLD


Series = dict[tuple[str, str | None], list[AcceptanceDay]]


def by_series(days: Iterable[AcceptanceDay]) -> Series:
    """Days by proposer and tag, in order, whichever models drafted: a worse model is a fall, too.

    Of two models on one day the figures are added; the fingerprint is that of the busier one.
    """
    found: dict[tuple[str, str | None], dict[int, AcceptanceDay]] = {}
    for day in days:
        by_day = found.setdefault((day.proposer, day.tag), {})
        other = by_day.get(day.day)
        by_day[day.day] = day if other is None else _added(day, other)
    return {key: [by_day[day] for day in sorted(by_day)] for key, by_day in found.items()}


def _added(one: AcceptanceDay, other: AcceptanceDay) -> AcceptanceDay:
    return replace(
        max(one, other, key=lambda day: day.tested),
        agreed=one.agreed + other.agreed,
        tested=one.tested + other.tested,
        superseded=one.superseded and other.superseded,
    )


def slow_fall(days: Sequence[AcceptanceDay]) -> SlowFall | None:
    """The test of one series of days, in their order. None: there is no baseline, or no news."""
    nights = [d for d in days if d.tested >= LEAST_TESTED and not d.superseded]
    if not nights or nights[-1].day < days[-1].day - MOST_SILENT:
        return None
    begin = nights[-1].day + 1 - BLOCK_DAYS
    tested = [d for d in nights if d.day >= begin]
    blocks = [_block(nights, begin - (n + 1) * BLOCK_DAYS) for n in range(BLOCKS)]
    known = [block for block in blocks if len(block) >= LEAST_NIGHTS and _level(block) > 0.0]
    if not known:
        return None
    best = max(known, key=_level)
    weekly = _weekly(known)
    level, deviation = _level(best), _deviation(known, weekly)
    score = 0.0
    for night in tested:
        below = weekly[night.day % 7] - _away(night, level)
        score += min(below / _spread(night, level, deviation), MOST_DEVIATIONS) - ALLOWANCE
        score = min(max(score, 0.0), CEILING)
    return SlowFall(level, best[0].day, best[-1].day, deviation, score)


def _block(nights: Sequence[AcceptanceDay], begin: int) -> list[AcceptanceDay]:
    return [d for d in nights if begin <= d.day < begin + BLOCK_DAYS]


def _rate(night: AcceptanceDay) -> float:
    return night.agreed / night.tested


def _level(nights: Sequence[AcceptanceDay]) -> float:
    """The mean without the tenth at either end: a broken night moves it little."""
    rates = sorted(map(_rate, nights))
    cut = len(rates) // 10
    return statistics.fmean(rates[cut : len(rates) - cut])


def _away(night: AcceptanceDay, level: float) -> float:
    """How far a night is above the level, as a share of it."""
    return _rate(night) / level - 1.0


def _weekly(blocks: Sequence[Sequence[AcceptanceDay]]) -> list[float]:
    """The same for the nights of each weekday, the less the fewer there are."""
    found: list[list[float]] = [[] for _ in range(7)]
    for block in blocks:
        level = _level(block)
        for night in block:
            found[night.day % 7].append(_away(night, level))
    return [statistics.median(of or [0.0]) * len(of) / (len(of) + 2.0) for of in found]


def _deviation(blocks: Sequence[Sequence[AcceptanceDay]], weekly: Sequence[float]) -> float:
    """By which nights differ from what is usual on their weekday, chance left out."""
    differ, chance = [], []
    for block in blocks:
        level = _level(block)
        differ += [_away(night, level) - weekly[night.day % 7] for night in block]
        chance += [_chance(night, level) for night in block]
    first, *_, last = statistics.quantiles(differ, n=10)
    variance = ((last - first) / _DECILES) ** 2 - statistics.median(chance)
    return math.sqrt(max(variance, LEAST_DEVIATION**2))


def _spread(night: AcceptanceDay, level: float, deviation: float) -> float:
    return math.sqrt(deviation**2 + _chance(night, level))


def _chance(night: AcceptanceDay, level: float) -> float:
    """The variance of a night's rate, as a share of the level, if nights did not differ."""
    level = min(level, 0.999)
    return DESIGN * (1.0 - level) / (level * night.tested)
