"""Drafts of vLLM's own speculation: EAGLE heads, MTP layers, a draft model, suffixes.

A core that is configured with one drafts in each of its steps, for the next. Those drafts lie with
its requests and are offered here beside those of blocks, history and n-grams. So the same policy
decides which of them are verified and how far, and the same accounts name them.

vLLM tells the tokens that were drafted, and how many of them a step verified and kept. It does not
tell the time that drafting took, which is part of its step, nor the probabilities that drafts were
drawn from: they have no price of their own, and no ratio test can use them.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from specbatch.pipeline.engines.models.draft_names import DRAFT_MODEL
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.state.sequence import Sequence


class CoreProposer(Proposer):
    """Offers what the core has drafted for a sequence."""

    def __init__(
        self, method: str, drafted: Callable[[str], Seq[int]], fingerprint: str = ""
    ) -> None:
        """`method` as vLLM calls it; `drafted` gives a request's draft tokens by its id."""
        self.name = f"{DRAFT_MODEL}@{method}"
        self.fingerprint = fingerprint
        self._drafted = drafted

    def available(self, sequence: Sequence) -> int:
        return len(self._drafted(sequence.request.request_id))

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        return [
            list(self._drafted(sequence.request.request_id)[:depth])
            for sequence, depth in zip(sequences, depths, strict=True)
        ]
