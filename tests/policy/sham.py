"""Sham jobs: an engine's bookkeeping with steps that are called drafting ones and draft nothing.

The real `StepTime` prices, the real `Controls` add up, the real `savings` concludes. So what is
found saved ought to be nothing, and the interval around it ought to hold as often as it says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from specbatch.pipeline.policy.costs.controls import Arm, Controls, Part
from specbatch.pipeline.policy.costs.savings import savings
from specbatch.pipeline.policy.step_cost import StepTime
from specbatch.schemas.job_figures import Savings

PRICE_MICROUSD = 3_600_000  # an hour; so that a tenth of a cent is a second
Noise = Callable[[random.Random], Iterator[float]]  # by what steps are slower than they should be


def slow(share: float) -> Noise:
    """So many steps take three times as long."""

    def noise(draw: random.Random) -> Iterator[float]:
        while True:
            yield (3.0 if draw.random() < share else 1.0) * draw.lognormvariate(0.0, 0.05)

    return noise


def lognormal(sigma: float) -> Noise:
    def noise(draw: random.Random) -> Iterator[float]:
        while True:
            yield draw.lognormvariate(0.0, sigma)

    return noise


def spells(draw: random.Random) -> Iterator[float]:
    """Somebody else is at work for some hundred steps, again and again."""
    while True:
        pace = draw.choice((1.0, 1.0, 1.5, 2.5))
        for _ in range(int(draw.expovariate(1 / 200)) + 1):
            yield pace * draw.lognormvariate(0.0, 0.2)


def wandering(draw: random.Random) -> Iterator[float]:
    """Each step is much like the one before."""
    state = 0.0
    while True:
        state = 0.98 * state + draw.gauss(0.0, 0.08)
        yield 2.718281828 ** (state + draw.gauss(0.0, 0.1))


def sham_job(
    noise: Noise, seed: int, steps: int, every: Callable[[int], int], speedup: float = 1.0
) -> Savings | None:
    """One whose drafting steps take what those at depth 0 do and decide `speedup` times the tokens.

    One step in `every(step)` is a control. With a speed-up of 1 nothing is drafted.
    """
    draw, step_time, controls = random.Random(seed), StepTime(), Controls()
    slowness = noise(draw)
    sequences, tokens = 64, 0
    for step in range(steps):
        sequences = 64 if step < 0.8 * steps else max(8, sequences - draw.randrange(2) * 4)
        took = (4e-4 + 2e-5 * sequences) * next(slowness)
        price = step_time.plain(sequences) or step_time.predict(sequences, sequences)
        step_time.observe(sequences, sequences, took)
        arm = Arm.CONTROL if draw.random() * every(step) < 1.0 else Arm.DRAFTS
        accepted = draw.randrange(round(2 * (speedup - 1.0) * sequences) + 1)
        decided = sequences + (accepted if arm is Arm.DRAFTS else 0)
        part = Part(took, decided, sequences)
        controls.step(arm, every(step) - 1.0, price, 0.0, {"sham": part})
        tokens += decided
    report = controls.take("sham").priced(PRICE_MICROUSD).report()
    return savings({"proposed": 1, "tokens": tokens} | report)


def covered(noise: Noise, jobs: int, steps: int, every: int = 16) -> tuple[int, float]:
    """Of so many jobs: in how many intervals nothing saved lies, and the mean half width as a share
    of what was taken."""
    inside, halves = 0, 0.0
    for seed in range(jobs):
        found = sham_job(noise, seed, steps, lambda _: every)
        assert found is not None
        assert found.low_usd is not None
        assert found.high_usd is not None
        inside += found.low_usd <= 0.0 <= found.high_usd
        halves += (found.high_usd - found.usd) / found.taken_usd
    return inside, halves / jobs
