"""The contract of every proposer: a draft is token ids, and only ever a hint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.policy.step_cost import LinearCost

if TYPE_CHECKING:  # stages import proposers, and need no torch
    from torch import Tensor


class Proposer(ABC):
    """Guesses the next tokens of sequences. Wrong guesses cost time, never correctness.

    Every proposer has a name, `available` and `propose`. The other methods are for those that
    have a model or keep something of a sequence.
    """

    name: str
    # Of the model that drafts. What is learned of its drafts is learned of this model and of no
    # other with its name. Empty: it has no model.
    fingerprint: str = ""
    # Seconds of a call of its model, by (calls, passes, tokens fed); None: drafts are free.
    pass_time: LinearCost | None = None
    # Whether it has `draft_probs`, as ratio tests need. It then samples with its own noise for a
    # sequence whose verification is not coupled.
    has_draft_probs = False

    @abstractmethod
    def available(self, sequence: Sequence) -> int:
        """How many draft tokens it could offer now; 0 when it has nothing to say."""

    @abstractmethod
    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        """At most `depths[i]` (>= 1) draft tokens for `sequences[i]`; fewer or none is allowed."""

    def confidence_bucket(self, sequence: Sequence) -> int:  # noqa: ARG002 - for those that can tell
        """A small number for how sure it is of what it could offer now; 0 if it cannot tell.

        Acceptance is measured per bucket, so the number need not mean a probability.
        """
        return 0

    def behind(self, sequence: Sequence) -> int:  # noqa: ARG002 - for those with a model
        """Tokens that its model would have to read before it drafts, at most."""
        return 0

    def draft_probs(self, sequence: Sequence) -> Tensor:
        """float32 [drafted, vocab_size]: what each token of the last draft was sampled from.

        Only of a proposer that has `has_draft_probs`.
        """
        raise NotImplementedError

    def next_token_logprobs(self, sequence: Sequence) -> Tensor | None:  # noqa: ARG002 - as `behind`
        """float32 [vocab_size] of the token behind the last; None where it cannot tell cheaply."""
        return None

    def on_verified(self, sequence: Sequence) -> None:  # noqa: B027 - most keep nothing
        """The sequence holds the verdict on its last draft: drop what was rejected."""

    def forget(self, sequence: Sequence) -> None:  # noqa: B027 - as `on_verified`
        """The sequence is finished or was preempted."""
