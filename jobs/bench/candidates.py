"""Given drafts as a candidate generator of transformers' assisted generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class ReplayCandidates:
    """Offers the next `depth` tokens of a draft of the whole output, and counts what is kept.

    It is what transformers calls a `CandidateGenerator`.
    """

    requires_model_outputs = False

    def __init__(self, prompt_tokens: int, draft: Sequence[int], depth: int) -> None:
        self.prompt_tokens, self.draft, self.depth = prompt_tokens, draft, depth
        self.proposed = self.accepted = self.offered = 0

    def get_candidates(self, input_ids: Tensor, **_: Any) -> tuple[Tensor, None]:
        """The ids so far, int64 [1, tokens], with the offered ones behind them."""
        written = input_ids.shape[1] - self.prompt_tokens
        # The last token of the output is the verifier's own in any case.
        offered = self.draft[written : min(written + self.depth, len(self.draft) - 1)]
        self.offered = len(offered)
        self.proposed += len(offered)
        more = torch.tensor([list(offered)], dtype=input_ids.dtype, device=input_ids.device)
        return torch.cat([input_ids, more], dim=1), None

    def update_candidate_strategy(
        self,
        input_ids: Tensor,  # noqa: ARG002 - the contract's
        scores: Tensor,  # noqa: ARG002 - the contract's
        num_matches: Any,
    ) -> None:
        self.accepted += min(int(num_matches), self.offered)
