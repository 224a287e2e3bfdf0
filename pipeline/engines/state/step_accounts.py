"""Accounts for each step: who pays for its time, and what depth 0 would have taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq

from specbatch.pipeline.engines.contract import EngineStats
from specbatch.pipeline.engines.state.accounting import OVERHEAD, TimeBook
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.engines.state.step import Step
from specbatch.pipeline.policy import tuning
from specbatch.pipeline.policy.costs.controls import Arm, Controls, Measured, Part
from specbatch.pipeline.policy.step_cost import StepTime
from specbatch.schemas.provenance import TICKS_PER_SEC


class StepAccounts:
    """Shares the time of steps among their sequences, and compares drafted steps with depth 0."""

    def __init__(self, stats: EngineStats, step_time: StepTime, multi_step: bool = False) -> None:
        """`stats` counts steps and time; `step_time` learns from ordinary steps.

        `multi_step`: depth 0 makes several passes in one call, so that a lone one is no measure
        of it.
        """
        self.multi_step = multi_step
        self._stats = stats
        self._step_time = step_time
        self._book = TimeBook(stats.time)
        self._controls = Controls()
        self._jobs: Counter[str] = Counter()  # requests on their way

    def begin(self, sequence: Sequence) -> None:
        self._jobs[sequence.request.route.job] += 1

    def end(self, sequence: Sequence) -> None:
        self._jobs -= Counter((sequence.request.route.job,))

    def overhead(self, sequence: Sequence, ticks: int) -> None:
        """Charge work that was done for one sequence alone."""
        self._book.add(sequence, OVERHEAD, ticks)

    def take(self, job: str) -> Measured:
        """What the controls of a job measured since the last call."""
        return self._controls.take(job)

    def passes_within(self, sec: float, sequences: int, most: int) -> int:
        """How many passes of so many sequences at depth 0 take `sec` together: 1 to `most`."""
        if not self._step_time.observations:
            return 1
        return max(1, min(most, int(sec / self._price(sequences))))

    def _price(self, sequences: int) -> float:
        """Seconds of a pass at depth 0, by what is known."""
        step_time = self._step_time
        return step_time.plain(sequences) or step_time.predict(sequences, sequences)

    def step(self, step: Step, parts: Seq[Step], padded: Callable[[int], int]) -> None:
        """`parts` of the step passed; `padded(rows)`: the rows that such a pass really has."""
        first = self._stats.steps + 1
        self._stats.steps += step.passes_made
        ticks, shares = self._book.share_step(
            step.begun, step.drafting_ticks, step.passes(parts), first, padded
        )
        self._stats.busy_sec += ticks / TICKS_PER_SEC
        if not (step.ordinary and step.decoding):
            return
        # A prompt's rows are cheaper, for they need no logits: only these steps are measurements.
        count, rows = len(step.deciding), len(step.plan) + sum(map(len, step.drafts))
        price = self._price(count)  # of before this step
        if step.draft_plan.arm is not Arm.SETTLING and self._is_measure(step, rows > count):
            taken, passes = ticks / TICKS_PER_SEC - _beside_depth_0(step), _passes(step)
            for _ in range(round(passes)):  # memory and certainty are counted in passes
                self._step_time.observe(rows, count, taken / passes)
        if step.draft_plan.arm is not Arm.APART:
            self._compare(step, ticks, shares, price)

    def _is_measure(self, step: Step, drafted: bool) -> bool:
        """Whether its time tells the price of such passes."""
        if step.passes_made > 1:
            return _passes(step) >= tuning.WHOLE_PASSES * step.passes_made
        is_lone = step.draft_plan.arm in (Arm.DRAFTS, Arm.APART) or step.is_watched
        return drafted or not (self.multi_step and is_lone)

    def _compare(self, step: Step, ticks: int, shares: Seq[int], price_sec: float) -> None:
        """Note what a decoding step took, beside what its tokens would have taken at depth 0."""
        arm, count = step.draft_plan.arm, len(step.deciding)
        beside = _beside_depth_0(step) * TICKS_PER_SEC / ticks if ticks else 0.0
        if arm in (Arm.DRAFTS, Arm.SETTLING):
            per_token = self._controls.level * price_sec / count
            for sequence in step.deciding:
                sequence.baseline_sec += step.emitted[sequence] * per_token
        else:
            per_tick = (1.0 - beside) / TICKS_PER_SEC
            for sequence, share in zip(step.deciding, shares, strict=True):
                sequence.baseline_sec += share * per_tick
        for sequence, share in zip(step.deciding, shares, strict=True):
            sequence.decode_sec += share / TICKS_PER_SEC
        parts = self._parts(step, ticks, shares)
        self._controls.step(arm, step.draft_plan.odds, price_sec, beside, parts)

    def _parts(self, step: Step, ticks: int, shares: Seq[int]) -> dict[str, Part]:
        """A step's time, tokens and sequences by job; mostly there is one."""
        if len(self._jobs) == 1:
            (job,) = self._jobs
            tokens = sum(step.emitted.values())
            return {job: Part(ticks / TICKS_PER_SEC, tokens, len(step.deciding))}
        found: dict[str, list[int]] = {}
        for sequence, share in zip(step.deciding, shares, strict=True):
            of = found.setdefault(sequence.request.route.job, [0, 0, 0])
            of[0] += share
            of[1] += step.emitted[sequence]
            of[2] += 1
        return {job: Part(t / TICKS_PER_SEC, tokens, n) for job, (t, tokens, n) in found.items()}


def _beside_depth_0(step: Step) -> float:
    """Seconds that the step spent on drafts and on choosing them, before its pass."""
    return step.drafting_ticks / TICKS_PER_SEC + step.draft_plan.replanning_sec


def _passes(step: Step) -> float:
    """The passes that it made, as if all of its sequences had been in each of them."""
    if step.passes_made == 1:
        return 1.0
    return sum(step.emitted.values()) / len(step.deciding)
