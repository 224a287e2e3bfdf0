"""What drafting saved, measured as an experiment: control steps at random, beside steps that draft.

While an engine drafts, a coin sends a step to depth 0 now and then. A step that drafts with
probability 1 - p and is a control with probability p is worth `odds` = (1 - p) / p drafting steps
when it turns out a control: summed with these weights, controls take in expectation exactly what
the drafting steps would have taken at depth 0, whatever the machine did meanwhile and however its
times are distributed. Nothing is clipped here: a slow pass was paid for, and counts in full.

A step that follows one with drafts finds caches and predictors full of other code and weights: with
a small model it takes a fifth longer, and several steps pass before that has worn off. Depth 0 does
not pay for it. So when the coin falls, some steps settle at depth 0 first, and only the one behind
them is the control; what settling costs is the drafts', and so are its tokens.

Few steps are controls, so their sum alone would waver. What wavers least is how much longer real
steps take than the policy's price of depth 0 says (`StepTime.plain`, known before the step):

    Y   seconds of a control step          m   the policy's price of a step at depth 0
    T   seconds of a drafting step         w   tokens it decided, per sequence
    level = Σ odds·Y / Σ odds·m            baseline = level · Σ w·m

The policy's price may be wrong by any factor: `level` takes it out again. What is assumed is that
how many tokens a step decides tells nothing of how slow the machine is in it.

A step that nothing was to be drafted in is depth 0 itself, and its own baseline. This module adds
up; `savings.py` says what follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from enum import Enum, auto

from specbatch.pipeline.policy.costs.pricing import device_usd

MOST_JOBS = 64  # of which sums are kept until they are asked for
_MEMORY = 1024.0  # control steps that the level reaches back, which single completions are told
_PREFIX = "measured_"  # of these sums, in a job's report


class Arm(Enum):
    """What a step is in the experiment."""

    PLAIN = auto()  # nothing was to be drafted
    SETTLING = auto()  # the coin fell on depth 0, but what drafts left behind has not worn off
    CONTROL = auto()
    DRAFTS = auto()
    APART = auto()  # depths that somebody asked for: no coin is thrown, so nothing is measured


@dataclass(frozen=True, slots=True)
class Measured:
    """Sums over a job's steps without prompts, of its sequences' share in them.

    They add up over groups, engines and devices. Times are seconds, once `priced` weighted by what
    the device costs: see `weight`.
    """

    drafting_steps: float = 0.0
    drafting_taken: float = 0.0  # Σ T
    drafting_tokens: float = 0.0  # decided in these
    drafting_price: float = 0.0  # Σ w·m
    drafting_price_squares: float = 0.0  # Σ (w·m)²
    control_steps: float = 0.0
    control_taken: float = 0.0  # Σ odds·Y
    control_price: float = 0.0  # Σ odds·m
    control_taken_squares: float = 0.0  # Σ (odds·Y)²
    control_products: float = 0.0  # Σ odds²·Y·m
    control_price_squares: float = 0.0  # Σ (odds·m)²
    plain_taken: float = 0.0  # of steps at depth 0, controls among them
    plain_tokens: float = 0.0  # decided in these
    plain_baseline: float = 0.0  # their time without drafts in shadow and choosing who drafts
    usd: float = 0.0  # of all that was taken; known once it is `priced`

    def __add__(self, other: Measured) -> Measured:
        return Measured(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def taken(self) -> float:
        return self.drafting_taken + self.plain_taken

    @property
    def tokens(self) -> float:
        return self.drafting_tokens + self.plain_tokens

    def priced(self, price_microusd: int) -> Measured:
        """The same on a device whose hour costs so many millionths of a dollar."""
        second = weight(price_microusd)
        values = {name: getattr(self, name) * second**power for name, power in _POWERS.items()}
        values["usd"] = device_usd(self.taken, price_microusd / 1e6)
        return Measured(**values)

    def report(self) -> dict[str, float]:
        """For a job's report, where such numbers are added up. Empty: nothing was measured."""
        if self == NOTHING_MEASURED:
            return {}
        return {_PREFIX + field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of_report(cls, report: Mapping[str, object]) -> Measured:
        found = {field.name: report.get(_PREFIX + field.name, 0.0) for field in fields(cls)}
        return cls(**{n: float(v) for n, v in found.items() if isinstance(v, int | float)})


NOTHING_MEASURED = Measured()

# Seconds to which power a sum is of.
_POWERS = {
    field.name: 2
    if field.name.endswith(("squares", "products"))
    else int(field.name.endswith(("taken", "price", "baseline")))
    for field in fields(Measured)
}


def weight(price_microusd: int) -> float:
    """What a second counts on a device: its price in dollars, or next to nothing where it is free.

    So money decides where only some devices cost something, and time where none does."""
    return device_usd(1.0, max(price_microusd, 1) / 1e6)


@dataclass(frozen=True, slots=True)
class Part:
    """A job's part of one step."""

    seconds: float  # its sequences' share
    tokens: int  # that they decided
    sequences: int


class Controls:
    """Sums of all jobs of one engine, until they are asked for."""

    def __init__(self) -> None:
        self._jobs: dict[str, list[float]] = {}
        self._taken = self._price = self._seen = 0.0

    @property
    def level(self) -> float:
        """How much longer a real step at depth 0 takes than its price says, by late controls."""
        return self._taken / self._price if self._price else 1.0

    def step(
        self, arm: Arm, odds: float, price_sec: float, beside: float, parts: Mapping[str, Part]
    ) -> None:
        """A step without prompts; a control made a pass for each token of a sequence.

        `price_sec`: the policy's for a pass at depth 0, before it was met.
        `beside`: the share of its time that went into drafts and choosing them. `parts` by job."""
        count = sum(part.sequences for part in parts.values())
        for job, part in parts.items():
            sums = self._sums(job)
            own = 1.0 - beside
            if arm in (Arm.DRAFTS, Arm.SETTLING):
                price = price_sec * part.tokens / count
                _add(sums, 0, 1.0, part.seconds, part.tokens, price, price * price)
                continue
            _add(sums, 11, part.seconds, part.tokens, part.seconds * own)
            if arm is Arm.CONTROL and part.tokens:
                taken = odds * part.seconds * own * part.sequences / part.tokens
                price = odds * price_sec * part.sequences / count
                squares = (taken * taken, taken * price, price * price)
                _add(sums, 5, 1.0, taken, price, *squares)
                self._learn(taken, price)

    def take(self, job: str) -> Measured:
        """A job's sums since this was last asked."""
        sums = self._jobs.pop(job, None)
        return NOTHING_MEASURED if sums is None else Measured(*sums)

    def _sums(self, job: str) -> list[float]:
        sums = self._jobs.get(job)
        if sums is None:
            if len(self._jobs) >= MOST_JOBS:
                del self._jobs[next(iter(self._jobs))]
            sums = self._jobs[job] = [0.0] * len(_POWERS)
        return sums

    def _learn(self, taken: float, price: float) -> None:
        self._taken += taken
        self._price += price
        self._seen += 1
        if self._seen >= _MEMORY:
            self._taken, self._price, self._seen = self._taken / 2, self._price / 2, _MEMORY / 2


def _add(sums: list[float], first: int, *values: float) -> None:
    for position, value in enumerate(values, first):
        sums[position] += value
