"""A circuit breaker around a proposer: its failures cost drafts and nothing else."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from torch import Tensor

from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.state.recovery import Fault, fault_of, with_type
from specbatch.pipeline.engines.state.sequence import Sequence

log = logging.getLogger(__name__)

PATIENCE = 3  # failures in a row until the circuit opens
OPEN_SEC = 60.0


class GuardedProposer(Proposer):
    """Does what `proposer` does. If that raises, the drafts of the call are dropped.

    The proposer forgets the call's sequences, since what it knows of them may be incomplete. After
    `PATIENCE` failures in a row the circuit opens: it offers nothing for `OPEN_SEC` seconds, and
    then one more failure opens it again. A lost device is not its failure: that error is raised.
    When `draft_probs` raises, the pass raises too and is repeated without drafts. Whoever asks for
    `next_token_logprobs` handles its errors.
    """

    def __init__(
        self,
        proposer: Proposer,
        on_failure: Callable[[], None],
        on_open: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_open` hears its name and a sentence."""
        self.name = proposer.name
        self.fingerprint = proposer.fingerprint
        self.pass_time = proposer.pass_time
        self.has_draft_probs = proposer.has_draft_probs
        self._on_open = on_open
        self._on_failure = on_failure
        self._proposer = proposer
        self._clock = clock
        self._in_a_row = 0
        self._open_until = -float("inf")

    def available(self, sequence: Sequence) -> int:
        if self._in_a_row >= PATIENCE and self._clock() < self._open_until:
            return 0
        return self._number(self._proposer.available, sequence)

    def behind(self, sequence: Sequence) -> int:
        return self._number(self._proposer.behind, sequence)

    def confidence_bucket(self, sequence: Sequence) -> int:
        return self._number(self._proposer.confidence_bucket, sequence)

    def _number(self, ask: Callable[[Sequence], int], sequence: Sequence) -> int:
        try:
            return ask(sequence)
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

    def draft_probs(self, sequence: Sequence) -> Tensor:
        return self._proposer.draft_probs(sequence)

    def next_token_logprobs(self, sequence: Sequence) -> Tensor | None:
        return self._proposer.next_token_logprobs(sequence)

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
        """Count a failure while `error` is handled. Logs one traceback per streak."""
        if fault_of(error) in (Fault.DEVICE, Fault.KERNEL):
            raise error
        self._on_failure()
        self._in_a_row += 1
        if self._in_a_row == 1:
            log.warning("proposer %s failed, its drafts are dropped", self.name, exc_info=error)
        if self._in_a_row >= PATIENCE:
            if self._clock() >= self._open_until:
                disabled = (
                    f"proposer {self.name} failed {self._in_a_row} times in a row and is disabled "
                    f"for {OPEN_SEC:.0f} s"
                )
                log.warning("%s: %s", disabled, with_type(error))
                # No message of the error: every job's decisions get this, and it may quote a text.
                self._on_open(self.name, f"{disabled}: {type(error).__name__}")
            self._open_until = self._clock() + OPEN_SEC
        for sequence in sequences:
            self.forget(sequence)
