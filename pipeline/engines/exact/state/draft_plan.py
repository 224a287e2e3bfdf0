"""What one step verifies beside each sequence's pending token, and what choosing it took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from specbatch.pipeline.policy.costs.controls import Arm


@dataclass(frozen=True, slots=True)
class Draft:
    """One proposer's guess at what follows one sequence: a hint, and nothing more."""

    token_ids: list[int] = field(default_factory=list)  # [num_draft_tokens]; empty: depth 0
    proposer: str = ""  # the proposer's name; "": nobody was asked, or had anything to say
    of_model: bool = False  # a draft model drafted it, in passes that take time
    # float32 [num_draft_tokens, vocab_size]: what each token was drawn from, processed. Computed
    # when a ratio test asks for it; None where the proposer does not know.
    probs: Callable[[], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def dropped(self) -> Draft:
        """The same without its tokens: its proposer still hears that the step is over."""
        return replace(self, token_ids=[])


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The speculator's decision for one step."""

    drafts: list[Draft]  # [num_sequences], in the order of the sequences that decide a token
    arm: Arm = Arm.RESTS  # what the step is in the experiment that measures savings
    odds: float = 0.0  # of drafting in this step, by those of its being a control
    drafting_sec: float = 0.0  # in models of proposers …
    replanning_sec: float = 0.0  # … and in choosing who drafts
