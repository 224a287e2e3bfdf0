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

    def confidence_bucket(self, sequence: Sequence) -> int:
        """A small number for how sure it is of what it could offer now; 0 if it cannot tell.

        Acceptance is measured per bucket, so the number need not mean a probability.
        """
        ...

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        """At most `depths[i]` (>= 1) draft tokens for `sequences[i]`; fewer or none is allowed."""
        ...

    def on_verified(self, sequence: Sequence) -> None:
        """The sequence holds the verdict on its last draft: drop what was rejected."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence is finished or was preempted."""
        ...


class ProbabilisticProposer(Proposer, Protocol):
    """Also knows the distribution that each draft token was sampled from, as ratio tests need.

    It samples with its own noise for a sequence whose verification is not coupled.
    """

    def draft_probs(self, sequence: Sequence) -> Tensor:
        """float32 [drafted, vocab_size]: what each token of the last draft was sampled from."""
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


def has_draft_probs(proposer: Proposer | None) -> TypeGuard[ProbabilisticProposer]:
    return hasattr(proposer, "draft_probs")
