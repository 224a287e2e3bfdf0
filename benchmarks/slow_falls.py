"""`make bench-slow-falls`: how soon a slow fall of acceptance is told, and how often falsely.

Nights are simulated. A night's acceptance differs from the job's by its weekday, by a share drawn
for the night, which resembles the night before, and by the chance of its tested tokens, of which
those of one sequence are alike. Some nights are missing. Each row of the results is one kind of
job: the false flags of a stable year, counted when the flag rises, and the nights until a fall of
1 % a day is told. The machine's speed plays no part.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from specbatch.pipeline.policy.slow_fall import BLOCK_DAYS, BLOCKS, slow_fall
from specbatch.schemas.speculation import AcceptanceDay

YEAR, WARM_UP = 365, 120  # days; those before a stable year, or before a fall
FALL = 0.01  # of the acceptance, a day
BAR_NIGHTS, BAR_FALSE = 21, 1.0  # until a fall is told; false flags in a stable year
KEPT = (BLOCKS + 1) * BLOCK_DAYS  # days that the test looks at


@dataclass(frozen=True, slots=True)
class Job:
    """A kind of nightly job, and how its nights differ."""

    rate: float = 0.7  # acceptance
    tested: tuple[int, int] = (2_000, 200_000)  # tokens of a night, from and to
    day_share: float = 0.02  # standard deviation of a night's share
    weekend: float = 0.0  # by which Saturdays and Sundays are lower
    resembles: float = 0.3  # correlation of a night's share with that of the night before
    missing: float = 0.05  # share of nights
    broken: float = 0.0  # share of nights at which half of the acceptance is gone
    sequence_tokens: int = 40  # tested, of one sequence
    sequence_share: float = 0.15  # correlation of two tokens of one sequence


def nights(
    job: Job, days: int, seed: str, level: Callable[[int], float] = lambda _day: 1.0
) -> Iterator[AcceptanceDay]:
    """Simulated days; `level` is the share of the acceptance that is left on a day."""
    draw = random.Random(seed)
    begin = draw.randrange(7)  # the weekday that day 0 is
    share = draw.gauss(0.0, job.day_share)
    innovation = job.day_share * (1.0 - job.resembles**2) ** 0.5
    low, high = job.tested
    for day in range(days):
        share = job.resembles * share + draw.gauss(0.0, innovation)
        weekly = 1.0 - job.weekend * ((begin + day) % 7 >= 5)
        weekly *= 0.5 if draw.random() < job.broken else 1.0
        rate = min(max(job.rate * level(day) * weekly * (1.0 + share), 0.0), 1.0)
        tested = round(low * (high / low) ** draw.random())
        alike = 1.0 + (job.sequence_tokens - 1) * job.sequence_share
        chance = (alike * rate * (1.0 - rate) / tested) ** 0.5
        seen = min(max(rate + draw.gauss(0.0, chance), 0.0), 1.0)
        if draw.random() >= job.missing:
            yield AcceptanceDay("draft-model", None, day, float(round(seen * tested)), tested)


def flags(days: Sequence[AcceptanceDay]) -> list[tuple[int, bool]]:
    """(day, whether the test says that acceptance falls) as of each night."""
    found = []
    for end, night in enumerate(days):
        newest = [d for d in days[max(0, end + 1 - KEPT) : end + 1] if d.day > night.day - KEPT]
        told = slow_fall(newest)
        found.append((night.day, told is not None and told.falls))
    return found


def false_flags(job: Job, seed: int) -> int:
    """How often the flag rises in a stable year."""
    told = flags(list(nights(job, WARM_UP + YEAR, f"stable {seed}")))
    year = [fell for day, fell in told if day >= WARM_UP]
    return sum(now and not before for before, now in pairwise([False, *year]))


def nights_to_flag(job: Job, seed: int, most: int = 2 * BAR_NIGHTS) -> int | None:
    """Days from the first one that is lower to the first flag. None: not within `most`."""

    def level(day: int) -> float:
        return (1.0 - FALL) ** max(0, day + 1 - WARM_UP)

    told = flags(list(nights(job, WARM_UP + most, f"falls {seed}", level)))
    found = (day + 1 - WARM_UP for day, fell in told if fell and day >= WARM_UP)
    return next(found, None)


def row_of(job: Job, seeds: int) -> dict[str, Any]:
    false = [false_flags(job, seed) for seed in range(seeds)]
    found = [nights_to_flag(job, seed) for seed in range(seeds)]
    told = sorted(nights for nights in found if nights is not None)
    return {
        **asdict(job),
        "false_flags_in_a_year": round(statistics.fmean(false), 4),
        "years_with_one": sum(map(bool, false)) / seeds,
        "found_within_21": sum(nights <= BAR_NIGHTS for nights in told) / seeds,
        "median_nights": statistics.median(told) if told else None,
        "nights_of_95_percent": told[min(len(told) - 1, round(0.95 * seeds))] if told else None,
    }


def jobs() -> Iterator[tuple[bool, Job]]:
    """Whether the bars are for this kind of job, and the kind. The others are harder."""
    sizes = ((2_000, 2_000), (2_000, 200_000), (200_000, 200_000))
    for tested, share, weekend in product(sizes, (0.01, 0.02, 0.03), (0.0, 0.1)):
        yield True, Job(tested=tested, day_share=share, weekend=weekend)
    yield True, Job(rate=0.4)
    yield True, Job(rate=0.95)
    yield True, Job(missing=0.3)
    yield True, Job(broken=0.02)
    yield False, Job(day_share=0.03, resembles=0.7)
    yield False, Job(day_share=0.06, weekend=0.2)
    yield False, Job(rate=0.4, tested=(2_000, 2_000), day_share=0.03)


def main() -> None:
    from specbatch.benchmarks.engine import RESULTS
    from specbatch.jobs.bench.machine import machine

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    began = time.monotonic()
    rows = []
    for has_bars, job in jobs():
        rows.append({"has_bars": has_bars, **row_of(job, arguments.seeds)})
        print(json.dumps(rows[-1]), flush=True)
    print(f"{time.monotonic() - began:.0f} s")
    results = {
        "machine": machine(),
        "seeds": arguments.seeds,
        "fall_a_day": FALL,
        "bars": {"nights": BAR_NIGHTS, "false_flags_in_a_year": BAR_FALSE},
        "rows": rows,
    }
    path = arguments.results / "slow-falls.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
