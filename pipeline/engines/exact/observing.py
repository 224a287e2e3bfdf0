"""What an engine tells somebody who measures it, if anybody does.

Nobody does: then it costs a few calls that do nothing. What is told are numbers, and never a text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from specbatch.pipeline.engines.clock import now
from specbatch.pipeline.engines.exact.proposers.proposer import Proposer
from specbatch.pipeline.engines.exact.speculation.drift import EVERY_STEPS, DriftWatch
from specbatch.pipeline.engines.exact.state.kv_blocks import BlockManager
from specbatch.pipeline.engines.exact.state.sequence import Sequence
from specbatch.schemas.figures import StepFigures
from specbatch.schemas.provenance import TICKS_PER_SEC
from specbatch.schemas.records import FinishReason

if TYPE_CHECKING:
    from specbatch.pipeline.engines.contract import EngineStats
    from specbatch.pipeline.engines.exact.state.step import Work

_ENDED = (FinishReason.STOP, FinishReason.LENGTH)


class Observer(Protocol):
    """Called in the engine's thread, so it may neither block nor raise. Jobs come by id."""

    def stepped(self, step: StepFigures) -> None:
        """A step is over."""
        ...

    def first_token(self, job_id: str, sec: float) -> None:
        """A request's first token is decided, so long after it came."""
        ...

    def finished(self, job_id: str, sec_per_token: float) -> None:
        """A request ended of itself; how long its tokens took behind the first one."""
        ...

    def turned(self, job_id: str, proposer: str, is_off: bool) -> None:
        """It was decided whether a proposer, or `ALL_PROPOSERS`, may draft for a job."""
        ...

    def drifted(self, proposer: str, nats: float) -> None:
        """KL(verifier ‖ proposer) in nats at one position."""
        ...


class Unwatched:
    """Nobody measures."""

    def ask(self, deciding: Seq[Sequence]) -> int:  # noqa: ARG002 - nothing is asked
        return 0

    def compare(self, work: Work, logits: Tensor) -> None:
        """Nothing is compared."""

    def decided(self, deciding: Seq[Sequence]) -> None:
        """Nobody hears it."""

    def stepped(self, parts: Seq[Work]) -> None:
        """Nobody hears it."""

    def finished(self, sequence: Sequence) -> None:
        """Nobody hears it."""


class Watch(Unwatched):
    """Tells an observer what is new since the step before."""

    def __init__(
        self,
        observer: Observer,
        stats: EngineStats,
        blocks: BlockManager,
        most_sequences: int,
        proposers: Seq[Proposer],
        drift_every: int = EVERY_STEPS,
    ) -> None:
        """`drift_every`: steps between two looks at how far draft models are; 0: none."""
        self._observer = observer
        self._stats = stats
        self._blocks = blocks
        self._most_sequences = most_sequences
        self._drift = DriftWatch(proposers, observer.drifted, drift_every)
        self._told = self._counts()
        self._first_at: dict[Sequence, int] = {}  # ticks; of those that have one

    def _counts(self) -> tuple[list[int], int, int, int]:
        of = self._stats
        return list(of.time), of.preemptions, of.raised_passes, of.proposer_failures

    def ask(self, deciding: Seq[Sequence]) -> int:
        """Before anything is drafted; the ticks that it took in a draft model."""
        begun = now()
        return now() - begun if self._drift.ask(deciding) else 0

    def compare(self, work: Work, logits: Tensor) -> None:
        self._drift.compare(work.deciding, work.drafts, logits)

    def decided(self, deciding: Seq[Sequence]) -> None:
        """They have what a pass decided."""
        at = now()
        for sequence in deciding:
            if sequence not in self._first_at and sequence.num_output:
                self._first_at[sequence] = at
                waited = (at - sequence.arrived) / TICKS_PER_SEC
                self._observer.first_token(sequence.request.route.job, waited)

    def stepped(self, parts: Seq[Work]) -> None:
        """A step is over, and `parts` is what passed of it."""
        passes, depths = [], Counter[tuple[str, int]]()
        for part in parts:
            drafted = list(map(len, part.drafts))
            passes.append((sum([p.take for p in part.plan]) + sum(drafted), len(part.plan)))
            depths.update(zip([draft.proposer for draft in part.drafts], drafted, strict=True))
        before, self._told = self._told, self._counts()
        self._stats.kv_blocks = self._blocks.counts
        self._observer.stepped(
            StepFigures(
                passes,
                self._most_sequences,
                depths,
                [a - b for a, b in zip(self._told[0], before[0], strict=True)],
                *(a - b for a, b in zip(self._told[1:], before[1:], strict=True)),
            )
        )
        self._drift.tell()

    def finished(self, sequence: Sequence) -> None:
        """It has left the engine."""
        self._stats.kv_blocks = self._blocks.counts
        first_at = self._first_at.pop(sequence, None)
        more = sequence.num_output - 1
        if first_at is not None and more > 0 and sequence.finish_reason in _ENDED:
            sec = (now() - first_at) / TICKS_PER_SEC
            self._observer.finished(sequence.request.route.job, sec / more)
