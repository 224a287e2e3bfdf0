"""What each mechanism of draft selection is worth: paired simulations with and without it.

The speculator and its policy are the real ones; machine, proposers and clock are simulated. Two
runs of one seed have the same sequences, the same passages and the same verdict on every draft
token, so they differ by what was removed alone. A run costs the time for a fixed number of tokens.

    python -m specbatch.benchmarks.ablation                  # every mechanism
    python -m specbatch.benchmarks.ablation trials drift     # these together, beside all of them
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from unittest.mock import patch

from specbatch.pipeline.engines.contract import Cohort, Request
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.speculation import router, speculator
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.policy import acceptance, depth, step_cost, tuning
from specbatch.pipeline.policy.step_cost import LinearCost
from specbatch.schemas.records import SamplingParams

KINDS = ("plain", "noisy", "stepped", "drifting", "collapsing", "ramping")
SOURCES = ("free", "model", "both", "models")
SEQUENCES = (2, 8, 32)  # at once, until a job's end leaves fewer
STEPS = 600  # of depth 0 with many sequences, for a run's tokens; up to four times as many with few
PASSAGE_TOKENS = 40
REPLAN_SEC, REPLAN_SEQUENCE_SEC = 8e-5, 6e-6  # of a replan, and of each sequence it looks at
PARAMS = SamplingParams(max_tokens=1_000_000)


@dataclass(frozen=True, slots=True)
class World:
    kind: str
    sources: str
    sequences: int
    seed: int

    def pass_sec(self, tokens: int, sequences: int) -> float:
        """Of the verifier, before noise and drift."""
        if self.kind == "stepped":
            return 5e-3 + 2.4e-3 * -(-tokens // 16) + 4e-5 * sequences
        return 8e-4 + 2.5e-5 * tokens + 1.5e-5 * sequences

    def slowness(self, noise: random.Random, done: float) -> float:
        """What a pass takes longer, `done` being the share of the tokens that are decided."""
        if self.kind == "noisy":
            return noise.lognormvariate(0.0, 0.12) * (3.0 if noise.random() < 1 / 30 else 1.0)
        if self.kind == "drifting":
            wave = 1.0 + 0.3 * math.sin(14.0 * done) + 0.5 * (0.4 < done < 0.55)
            return wave * noise.lognormvariate(0.0, 0.05)
        return noise.lognormvariate(0.0, 0.02)

    def rate(self, base: float, sequence: int, position: int, done: float) -> float:
        """Acceptance of a draft token: by sequence, by passage, and by time."""
        own = 0.25 * (hashed(self.seed, sequence) - 0.5)
        passage = 0.3 * (hashed(self.seed, sequence, position // PASSAGE_TOKENS) - 0.5)
        if self.kind == "drifting":
            base += 0.2 * math.sin(9.0 * done)
        if self.kind == "collapsing" and done > 0.4:
            base *= 0.06
        if self.kind == "ramping" and done < 0.4:
            base *= 0.06
        return min(max(base + own + passage, 0.01), 0.98)


def hashed(*values: int) -> float:
    """In [0, 1), the same for the same values."""
    mixed = 0
    for value in values:
        mixed = ((mixed ^ value) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % 2**64
        mixed ^= mixed >> 29
    return mixed / 2**64


class Clock:
    """The speculator's `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Source(Proposer):
    """A proposer; `prices` are seconds of a call, a pass and a token, if a model drafts."""

    def __init__(
        self, clock: Clock, name: str, base: dict[str, float], there: float, *prices: float
    ) -> None:
        self.clock, self.name, self.base, self.there, self.prices = clock, name, base, there, prices
        self.pass_time = LinearCost([1e-4, 5e-5, 1e-6]) if prices else None
        self.read: dict[Sequence, int] = {}

    def available(self, sequence: Sequence) -> int:
        if self.prices:
            return 8
        there = hashed(len(self.name), sequence.request.seed, len(sequence.tokens) // 12)
        return 16 if there < self.there else 0

    def behind(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - self.read.get(sequence, 0) if self.prices else 0

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        if self.prices and self.pass_time is not None:
            fed = sum(map(self.behind, sequences)) + sum(depths) - len(sequences)
            sizes = (1.0, float(max(depths)), float(fed))
            seconds = sum(size * price for size, price in zip(sizes, self.prices, strict=True))
            self.pass_time.observe(sizes, seconds)
            self.clock.now += seconds
            self.read.update((s, len(s.tokens)) for s in sequences)
        return [
            [7] * min(depth, self.available(sequence))
            for sequence, depth in zip(sequences, depths, strict=True)
        ]

    def forget(self, sequence: Sequence) -> None:
        self.read.pop(sequence, None)


def sources_of(world: World, clock: Clock) -> list[Source]:
    free = Source(clock, "history", {"easy": 0.85, "hard": 0.55}, 0.6)
    model = Source(clock, "model", {"easy": 0.7, "hard": 0.6}, 1.0, 1e-4, 1.2e-4, 2e-6)
    other = Source(clock, "model@2", {"easy": 0.45, "hard": 0.8}, 1.0, 1e-4, 1.6e-4, 2e-6)
    found = {"free": [free], "model": [model], "both": [free, model], "models": [model, other]}
    return found[world.sources]


def sequence_of(number: int, length: int) -> Sequence:
    tag = ("easy", "hard")[number % 2]
    request = Request(f"{number}", (1, 2, 3), PARAMS, seed=number, route=Cohort("job", tag))
    return Sequence(request, frozenset(), max_length=3 + length)


def run(world: World, drafts: bool = True) -> float:
    """Seconds for the world's tokens."""
    clock, draw = Clock(), random.Random(world.seed)
    noise = random.Random(world.seed + 1)
    sources = sources_of(world, clock) if drafts else []
    by_name = {source.name: source for source in sources}
    steps = STEPS * (4 if world.sequences == 2 else 2 if world.sequences == 8 else 1)
    wanted, decided = steps * world.sequences, 0
    running: list[Sequence] = []
    with patch.object(speculator, "time", clock):
        made = speculator.Speculator(sources, coin=random.Random(world.seed + 2).random)
        choose = made._options_of_all

        def choosing(view: Seq[Sequence], count: int) -> object:
            clock.now += REPLAN_SEC + REPLAN_SEQUENCE_SEC * len(view) * len(sources)
            return choose(view, count)

        made._options_of_all = choosing  # type: ignore[method-assign, assignment]  # its time

        lengths = [draw.randint(60, 360) for _ in range(wanted // 210)]
        waiting = [sequence_of(number, length) for number, length in enumerate(lengths)]
        while waiting or running:
            while waiting and len(running) < world.sequences:
                running.append(waiting.pop())
            count, done = len(running), decided / wanted
            plan = made.propose(running, lambda _, wanted: wanted)
            drafted = sum(map(len, plan.drafts))
            seconds = world.pass_sec(count + drafted, count) * world.slowness(noise, done)
            clock.now += seconds
            made.knowledge.step_time.observe(count + drafted, count, seconds)
            for sequence, draft in zip(running, plan.drafts, strict=True):
                agreed, at, seed = 0, len(sequence.tokens), sequence.request.seed
                if draft:
                    base = by_name[draft.proposer].base[str(sequence.request.route.tag)]
                    while agreed < len(draft) and hashed(
                        world.seed, seed, at + agreed, 77
                    ) < world.rate(base, seed, at + agreed, done):
                        agreed += 1
                decided += agreed + 1
                sequence.tokens.extend([7] * (agreed + 1))
                made.on_verified(sequence, draft, agreed)
                if sequence.remaining <= 0:
                    made.forget(sequence)
            running = [sequence for sequence in running if sequence.remaining > 0]
    return clock.now


SPECULATOR, CONTROLLER, ROUTER = speculator.Speculator, depth.Controller, router.Router
OF_NEWCOMER = SPECULATOR._of_newcomer
Patch = tuple[object, str, object]  # what is patched, and by what


def constants(**values: object) -> list[Patch]:
    return [(tuning, name, value) for name, value in values.items()]


def fixed_weight(self: acceptance.Own, expected: float, _: acceptance.Spread) -> float:
    self.faded.weight = 64.0
    return self.faded.rate_given(expected)


def averaged(self: speculator.Speculator, sequence: Sequence) -> object:
    self._selection.left.clear()
    return OF_NEWCOMER(self, sequence)


MECHANISMS: dict[str, list[Patch]] = {
    "fresh": constants(FRESH_TESTS=0),
    "doubt": constants(OPTIMISM_TESTS=0),
    "surprise": [(acceptance.Tracks, "surprised", lambda _: False)],
    "spread": [(acceptance.Own, "rate", fixed_weight)],
    "own-record": [(acceptance.Own, "rate", lambda _self, expected, _spread: expected)],
    "soften": [(acceptance.Tracks, "soften", lambda *_: None)],
    "drift": [(step_cost.StepTime, "_follow", lambda *_: None)],
    "noise": constants(NOISE_MEMORY=1e12),
    "stale": constants(CELL_STALE=10**12),
    "pass-clip": constants(PASS_CLIP=1e9),
    "pools": [(step_cost, "_never_falling", lambda values, _: values)],
    "cell-sure": constants(CELL_SURE=1),
    "draft-clip": constants(DRAFT_CLIP=1e9),
    "trials": constants(EXPLORE_EVERY_REPLANS=10**9),
    "halfway": [(CONTROLLER, "_optimistic", lambda self, of, n, _: self._decide(of, n, 1.0)[0])],
    "untried": constants(TRY_EVERY_STEPS=10**12),
    "hysteresis": constants(HYSTERESIS=1.0),
    "first-depths": constants(FIRST_DEPTHS=(0, 4)),
    "hold": [(CONTROLLER, "_hold_steps", lambda *_: 32)],
    "sampling": [(SPECULATOR, "_sample", lambda _, deciding: deciding)],
    "watching": [(SPECULATOR, "_is_worth_watching", lambda *_: False)],
    "left": [(SPECULATOR, "_of_newcomer", averaged)],
    "newcomers": [(SPECULATOR, "_of_newcomer", lambda *_: None)],
    "stand-in": [(ROUTER, "suits", lambda *_: False)],
    "open-twice": constants(LONGEST_OPEN_STEPS=256),
    "same-tests": constants(SAME_TESTS_STEPS=0),
    "teams": [(router, "teams", lambda models: [tuple(models)])],
    "stays": constants(MODEL_STAYS=1.0),
    "model-trials": constants(MODEL_ALLOWANCE=0.0, FIRST_MODEL_ALLOWANCE=0.0),
    "fade": constants(ROUTE_FADE_STEPS=1e12),
    "reading": [(ROUTER, "_behind", lambda *_: 0)],
}


def seconds_of(worlds: Seq[World], removed: Seq[str]) -> list[float]:
    with ExitStack() as stack:
        for name in removed:
            for patched in MECHANISMS[name]:
                stack.enter_context(patch.object(*patched))
        return [run(world) for world in worlds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("removed", nargs="*", choices=[[], *MECHANISMS])
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    seeds = [1000 * seed + 17 for seed in range(arguments.seeds)]
    worlds = [World(*values) for values in product(KINDS, SOURCES, SEQUENCES, seeds)]
    plain, whole = [run(world, drafts=False) for world in worlds], seconds_of(worlds, ())
    worst = max(a / b for a, b in zip(whole, plain, strict=True))
    print(f"{len(worlds)} runs with everything: worst {worst:.3f} of depth 0's time", flush=True)
    for names in [arguments.removed] if arguments.removed else [[name] for name in MECHANISMS]:
        found = seconds_of(worlds, names)
        ratios = [a / b for a, b in zip(found, whole, strict=True)]
        at = max(range(len(worlds)), key=lambda i: ratios[i])
        worst = max(a / b for a, b in zip(found, plain, strict=True))
        print(
            f"{'+'.join(names):14} mean {statistics.geometric_mean(ratios) - 1:+.2%}, "
            f"worst {ratios[at] - 1:+.1%} ({worlds[at]}), {worst:.3f} of depth 0's time",
            flush=True,
        )


if __name__ == "__main__":
    main()
