"""The contract of every proposer: a draft is token ids, and only ever a hint."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol, TypeGuard

from torch import Tensor

from specbatch.pipeline.engines.exact.state.sequence import Sequence
from specbatch.pipeline.policy.linear_cost import LinearCost


class Proposer(Protocol):
    """Guesses the next tokens of sequences. Wrong guesses cost time, never correctness."""

    name: str

    @property
    def pass_time(self) -> LinearCost | None:
        """Seconds of a call of its model, by (calls, passes, tokens fed); None: drafts are free."""
        ...

    def available(self, sequence: Sequence) -> int:
        """How many draft tokens it could offer now; 0 when it has nothing to say."""
        ...

    def grade(self, sequence: Sequence) -> int:
        """How sure it is of what it could offer now, as a small class number; 0 where it cannot
        tell. Acceptance is measured per class, so a number need not mean a probability."""
        ...

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        """At most `depths[i]` (>= 1) draft tokens for `sequences[i]`; fewer or none is allowed."""
        ...

    def settle(self, sequence: Sequence) -> None:
        """Its last draft was verified and the sequence holds the verdict: drop what was refused."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence is finished or was preempted."""
        ...


class LawfulProposer(Proposer, Protocol):
    """One that knows the law its tokens were drawn from, as ratio tests need it.

    For a sequence whose verification is not coupled it draws with noise of its own.
    """

    def laws(self, sequence: Sequence) -> Tensor:
        """float32 [drafted, vocab_size]: the law of each token of its last draft, processed."""
        ...


class ReadingProposer(Proposer, Protocol):
    """One whose model must have read a sequence before it drafts."""

    def behind(self, sequence: Sequence) -> int:
        """Tokens it would have to read first, at most."""
        ...


def tokens_behind(proposer: Proposer, sequence: Sequence) -> int:
    """Tokens that would have to be read before it drafts; 0 where nothing is read."""
    return proposer.behind(sequence) if _reads(proposer) else 0


def _reads(proposer: Proposer) -> TypeGuard[ReadingProposer]:
    return hasattr(proposer, "behind")


def has_laws(proposer: Proposer | None) -> TypeGuard[LawfulProposer]:
    return hasattr(proposer, "laws")
