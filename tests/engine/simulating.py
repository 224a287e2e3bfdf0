"""A real speculator on a simulated machine: sequences whose drafts are accepted at known rates.

No model, no clock: seconds come of the machine, acceptance of a seeded coin.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import pytest
from policy.machines import Machine, linear

from specbatch.pipeline.engines.contract import Cohort, Request
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.speculation.shadow import Shadow
from specbatch.pipeline.engines.speculation.speculator import Speculator
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.engines.state.step import Draft, DraftPlan
from specbatch.pipeline.policy.acceptance import Track
from specbatch.pipeline.policy.step_cost import LinearCost
from specbatch.schemas.records import SamplingParams

GLANCE_SEC = 2e-5  # what lies between two glances at the clock
AMPLE = 1_000_000
WARM = 600  # steps after which machine and sources are known

ENDLESS = Request("r", (1, 2, 3), SamplingParams(max_tokens=AMPLE), seed=1)

Rate = Callable[[Sequence], float]


class Clock:
    """The speculator's `time`: seconds that the simulation lets pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += GLANCE_SEC
        return self.now


class Source(Proposer):
    """A proposer of nothing in particular, whose drafts are accepted at `rate(sequence)`."""

    def __init__(self, name: str, rate: float | Rate, limit: int = 16) -> None:
        self.name = name
        self.limit: Callable[[Sequence], int] = lambda _: limit
        self.rate: Rate = rate if callable(rate) else lambda _: rate
        self.asked: list[list[tuple[Sequence, int]]] = []  # by call
        self.took = 0.0  # seconds in its model
        self.verified: list[Sequence] = []
        self.forgotten: list[Sequence] = []

    def available(self, sequence: Sequence) -> int:
        return self.limit(sequence)

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        assert all(depth >= 1 for depth in depths)
        self.asked.append(list(zip(sequences, depths, strict=True)))
        return [[7] * min(depth, self.limit(s)) for s, depth in zip(sequences, depths, strict=True)]

    def on_verified(self, sequence: Sequence) -> None:
        self.verified.append(sequence)

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence)

    @property
    def drafted(self) -> int:
        return sum(depth for call in self.asked for _, depth in call)

    def take_asked(self) -> list[list[tuple[Sequence, int]]]:
        """What it was asked for since this was last called."""
        asked, self.asked = self.asked, []
        return asked


class ModelSource(Source):
    """One whose drafts take time, by a price list of (call, pass, token)."""

    def __init__(
        self,
        name: str,
        rate: float | Rate,
        clock: Clock,
        prices: tuple[float, float, float] = (1e-5, 5e-5, 1e-6),
        limit: int = 8,
    ) -> None:
        super().__init__(name, rate, limit)
        self.pass_time = LinearCost([1e-4, 5e-5, 1e-6])
        self._clock, self._prices = clock, prices

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        assert self.pass_time is not None
        drafts = super().propose(sequences, depths)
        sizes = (1.0, float(max(depths)), float(sum(depths)))
        seconds = sum(size * price for size, price in zip(sizes, self._prices, strict=True))
        self.pass_time.observe(sizes, seconds)
        self._clock.now += seconds
        self.took += seconds
        return drafts


@dataclass(slots=True)
class TossedShadow(Shadow):
    """Depth 0 decides 7 everywhere: a coin says up to where a draft is that."""

    coin: Callable[[], float] = random.random
    rates: dict[Proposer, Rate] = field(default_factory=dict)

    def keep(self, sequence: Sequence, proposer: Proposer, draft: list[int], track: Track) -> None:
        rate, right = self.rates[proposer](sequence), 0
        while right < len(draft) and self.coin() < rate:
            right += 1
        tossed = [7] * right + [8] * (len(draft) - right)
        Shadow.keep(self, sequence, proposer, tossed, track)


@dataclass
class Simulation:
    """Steps of a speculator with sequences that never end unless they are replaced."""

    machine: Machine
    proposers: Seq[Source]
    clock: Clock
    noise: float = 0.0
    replaced_after: int = AMPLE  # output tokens
    tokens: int = 0  # decided
    drafted: int = 0  # of the last step
    plan: DraftPlan = field(default_factory=lambda: DraftPlan([]))  # of the last step

    def __post_init__(self) -> None:
        self.coin = random.Random(7).random
        self.speculator = Speculator(self.proposers, coin=lambda: self.coin())
        rates: dict[Proposer, Rate] = {one: one.rate for one in self.proposers}
        self.speculator._at_rest = TossedShadow(False, coin=random.Random(11).random, rates=rates)
        self.random = random.Random(5)
        self._sources = {source.name: source for source in self.proposers}
        self.sequences: list[Sequence] = []
        self._numbers = iter(range(AMPLE))

    def add(self, count: int, **values: object) -> list[Sequence]:
        new = [
            self.of(replace(ENDLESS, request_id=f"{next(self._numbers)}", **values))  # type: ignore[arg-type]  # by name
            for _ in range(count)
        ]
        self.sequences += new
        return new

    def without_controls(self) -> None:
        """From now on the coin never falls on depth 0."""
        self.coin = lambda: 1.0

    @staticmethod
    def of(request: Request) -> Sequence:
        return Sequence(request, frozenset(), max_length=AMPLE)

    def step(self) -> None:
        """One step as the engine makes it: drafts, a pass, verdicts."""
        deciding, count = self.sequences, len(self.sequences)
        self.plan = self.speculator.propose(deciding, lambda _, wanted: wanted)
        self.drafted = sum(map(len, self.plan.drafts))
        seconds = self.machine(count + self.drafted, count)
        self.clock.now += seconds
        if self.noise:
            seconds *= self.random.lognormvariate(0.0, self.noise)
        self.speculator.knowledge.step_time.observe(count + self.drafted, count, seconds)
        for i, (sequence, draft) in enumerate(zip(list(deciding), self.plan.drafts, strict=True)):
            agreed = self._agreed(sequence, draft)
            sequence.accept(draft.token_ids, [7] * (agreed + 1), [0.0] * (agreed + 1))
            self.speculator.on_verified(sequence, draft, agreed)
            self.tokens += agreed + 1
            if sequence.num_output >= self.replaced_after:
                self.speculator.forget(sequence)
                self.sequences[i] = self.of(
                    replace(sequence.request, request_id=f"{next(self._numbers)}")
                )

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def run_until(self, happened: Callable[[], bool], most_steps: int) -> None:
        """Steps until something has happened; fails if it does not."""
        for _ in range(most_steps):
            if happened():
                return
            self.step()
        raise AssertionError(f"nothing of the kind happened within {most_steps} steps")

    def _agreed(self, sequence: Sequence, draft: Draft) -> int:
        if not draft:
            return 0
        rate, agreed = self._sources[draft.proposer].rate(sequence), 0
        while agreed < len(draft) and self.random.random() < rate:
            agreed += 1
        return agreed


def route(job: str = "", tag: str | None = None) -> Cohort:
    return Cohort(job, tag)


def simulation(
    clock: Clock, *sources: Source, count: int = 8, warm: int = WARM, **request: object
) -> Simulation:
    """`count` sequences of one job, on a machine that is known."""
    made = Simulation(linear, sources, clock)
    made.add(count, **{"route": route("nightly"), **request})
    made.run(warm)
    for source in sources:
        source.take_asked()
    return made


def depths_of(source: Source) -> dict[Sequence, int]:
    """The deepest each sequence was drafted for by a source."""
    deepest: dict[Sequence, int] = {}
    for call in source.asked:
        for sequence, depth in call:
            deepest[sequence] = max(depth, deepest.get(sequence, 0))
    return deepest


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock of ours in the speculator's hands."""
    clock = Clock()
    monkeypatch.setattr("specbatch.pipeline.engines.speculation.speculator.time", clock)
    return clock
