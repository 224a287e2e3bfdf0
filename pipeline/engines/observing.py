"""Optional instrumentation hooks of the engine. An observer gets numbers and never a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from specbatch.pipeline.engines.clock import now
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.speculation.drift import EVERY_STEPS, DriftWatch
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.figures import StepFigures
from specbatch.schemas.provenance import TICKS_PER_SEC
from specbatch.schemas.records import FINISHED

if TYPE_CHECKING:
    from specbatch.pipeline.engines.contract import EngineStats
    from specbatch.pipeline.engines.state.step import Step


class Observer(Protocol):
    """Called in the engine's thread, so it must neither block nor raise."""

    def stepped(self, step: StepFigures) -> None:
        """A step is over."""
        ...

    def first_token(self, job_id: str, sec: float) -> None:
        """A request's first token was decided, `sec` after the request came."""
        ...

    def finished(self, job_id: str, sec_per_token: float) -> None:
        """A request ended by a stop or by length; the time per token after its first."""
        ...

    def drafting_switched(self, job_id: str, proposer: str, is_off: bool) -> None:
        """A proposer, or `ALL_PROPOSERS`, was enabled or disabled for a job."""
        ...

    def acceptance_collapsed(self, job_id: str, proposer: str, is_far_below: bool) -> None:
        """A proposer's acceptance on a job fell far below its best, or is back."""
        ...

    def drifted(self, proposer: str, nats: float) -> None:
        """KL(verifier ‖ proposer) in nats at one position."""
        ...


class Watch:
    """Hooks that report to an observer what changed since the step before."""

    def __init__(
        self,
        observer: Observer,
        stats: EngineStats,
        count_blocks: Callable[[], tuple[int, int, int]],
        most_sequences: int,
        proposers: Seq[Proposer] = (),
        drift_every: int = EVERY_STEPS,
    ) -> None:
        """`count_blocks` returns KV blocks that are held, free, and cached. `drift_every`: steps
        between two measurements of drift; 0: never measure."""
        self._observer = observer
        self._stats = stats
        self._count_blocks = count_blocks
        self._most_sequences = most_sequences
        self._drift = DriftWatch(proposers, observer.drifted, drift_every)
        self._reported = self._counts()
        self._first_at: dict[Sequence, int] = {}  # ticks; of those that have one

    def _counts(self) -> tuple[list[int], int, int, int]:
        of = self._stats
        return list(of.time), of.preemptions, of.raised_passes, of.proposer_failures

    def ask(self, deciding: Seq[Sequence], is_off: Callable[[str, Sequence], bool]) -> int:
        """Called before drafting. Returns the 100-ns units that a draft model took. `is_off`: an
        operator has switched a proposer, by its name, off for a sequence."""
        begun = now()
        return now() - begun if self._drift.ask(deciding, is_off) else 0

    def compare(self, step: Step, logits: Tensor) -> None:
        """The verifier's logits are there."""
        self._drift.compare(step.deciding, step.drafts, logits)

    def decided(self, deciding: Seq[Sequence]) -> None:
        """A pass decided tokens of these sequences."""
        at = now()
        for sequence in deciding:
            if sequence not in self._first_at and sequence.num_output:
                self._first_at[sequence] = at
                waited = (at - sequence.arrived) / TICKS_PER_SEC
                self._observer.first_token(sequence.request.route.job, waited)

    def stepped(self, parts: Seq[Step]) -> None:
        """A step is over; `parts` are the passes that did not raise."""
        passes, depths = [], Counter[tuple[str, int]]()
        for part in parts:
            drafted = list(map(len, part.drafts))
            passes.append((sum([p.take for p in part.plan]) + sum(drafted), len(part.plan)))
            depths.update(zip([draft.proposer for draft in part.drafts], drafted, strict=True))
            for later in range(1, part.passes_made):
                if left := sum(tokens > later for tokens in part.emitted.values()):
                    passes.append((left, left))
                    depths["", 0] += left
        before, self._reported = self._reported, self._counts()
        self._stats.kv_blocks = self._count_blocks()
        self._observer.stepped(
            StepFigures(
                passes,
                self._most_sequences,
                depths,
                [a - b for a, b in zip(self._reported[0], before[0], strict=True)],
                *(a - b for a, b in zip(self._reported[1:], before[1:], strict=True)),
            )
        )
        self._drift.report()

    def finished(self, sequence: Sequence) -> None:
        """The sequence left the engine."""
        self._stats.kv_blocks = self._count_blocks()
        first_at = self._first_at.pop(sequence, None)
        more = sequence.num_output - 1
        if first_at is not None and more > 0 and sequence.finish_reason in FINISHED:
            sec = (now() - first_at) / TICKS_PER_SEC
            self._observer.finished(sequence.request.route.job, sec / more)
