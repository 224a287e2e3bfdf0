"""A proposer whose failures cost its drafts and nothing else."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from torch import Tensor

from specbatch.pipeline.engines.exact.proposers.proposer import (
    ProbabilisticProposer,
    Proposer,
    has_draft_probs,
    tokens_behind,
)
from specbatch.pipeline.engines.exact.state.recovery import Fault, fault_of, with_type
from specbatch.pipeline.engines.exact.state.sequence import Sequence
from specbatch.pipeline.policy.linear_cost import LinearCost

log = logging.getLogger(__name__)

PATIENCE = 3  # failures behind one another until it rests
REST_SEC = 60.0


class GuardedProposer:
    """Does what `proposer` does. Where that raises, the drafts of the call are dropped.

    What it knew of the call's sequences is forgotten, since it may be half of the truth. After
    `PATIENCE` failures without a success between them it offers nothing for `REST_SEC` seconds;
    then one more failure is enough for the next rest. A lost device is not its failure: that is
    raised on.
    """

    def __init__(
        self,
        proposer: Proposer,
        on_failure: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        on_rest: Callable[[str, str], None] | None = None,
    ) -> None:
        self.name = proposer.name
        self._on_rest = on_rest
        self._on_failure = on_failure
        self._proposer = proposer
        self._clock = clock
        self._in_a_row = 0
        self._rests_until = -float("inf")

    @property
    def pass_time(self) -> LinearCost | None:
        return self._proposer.pass_time

    def available(self, sequence: Sequence) -> int:
        if self._in_a_row >= PATIENCE and self._clock() < self._rests_until:
            return 0
        try:
            return self._proposer.available(sequence)
        except Exception as error:
            self._failed(error, [sequence])
            return 0

    def behind(self, sequence: Sequence) -> int:
        try:
            return tokens_behind(self._proposer, sequence)
        except Exception as error:
            self._failed(error, [sequence])
            return 0

    def confidence_bucket(self, sequence: Sequence) -> int:
        try:
            return self._proposer.confidence_bucket(sequence)
        except Exception as error:
            self._failed(error, [sequence])
            return 0

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        try:
            drafts = self._proposer.propose(sequences, depths)
        except Exception as error:
            self._failed(error, sequences)
            return [[] for _ in sequences]
        self._in_a_row = 0
        return drafts

    def on_verified(self, sequence: Sequence) -> None:
        try:
            self._proposer.on_verified(sequence)
        except Exception as error:
            self._failed(error, [sequence])

    def forget(self, sequence: Sequence) -> None:
        try:
            self._proposer.forget(sequence)
        except Exception as error:
            self._failed(error, ())

    def _failed(self, error: Exception, sequences: Seq[Sequence]) -> None:
        """Called while `error` is handled. One traceback a streak is logged, and the rest."""
        if fault_of(error) in (Fault.DEVICE, Fault.KERNEL):
            raise error
        self._on_failure()
        self._in_a_row += 1
        if self._in_a_row == 1:
            log.warning("proposer %s failed, its drafts are dropped", self.name, exc_info=error)
        if self._in_a_row >= PATIENCE:
            if self._clock() >= self._rests_until:
                rests = (
                    f"proposer {self.name} failed {self._in_a_row} times in a row and rests for "
                    f"{REST_SEC:.0f} s"
                )
                log.warning("%s: %s", rests, with_type(error))
                if self._on_rest is not None:
                    # Every job's decisions get it, and what was raised may quote one job's text.
                    self._on_rest(self.name, f"{rests}: {type(error).__name__}")
            self._rests_until = self._clock() + REST_SEC
        for sequence in sequences:
            self.forget(sequence)


class GuardedProbabilisticProposer(GuardedProposer):
    """The same for a proposer with draft probabilities.

    When `draft_probs` raises, the pass raises too and is repeated without drafts.
    """

    def __init__(
        self,
        proposer: ProbabilisticProposer,
        on_failure: Callable[[], None],
        on_rest: Callable[[str, str], None] | None = None,
    ) -> None:
        super().__init__(proposer, on_failure, on_rest=on_rest)
        self._inner = proposer

    def draft_probs(self, sequence: Sequence) -> Tensor:
        return self._inner.draft_probs(sequence)


def guarded(
    proposer: Proposer,
    on_failure: Callable[[], None],
    on_rest: Callable[[str, str], None] | None = None,
) -> GuardedProposer:
    """Wraps `proposer`, `draft_probs` included. `on_rest` hears its name and a sentence."""
    if has_draft_probs(proposer):
        return GuardedProbabilisticProposer(proposer, on_failure, on_rest)
    return GuardedProposer(proposer, on_failure, on_rest=on_rest)
