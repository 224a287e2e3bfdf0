"""Drafts of a chosen acceptance: the known output, each token spoilt with a fixed probability."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from specbatch.pipeline.engines.exact.proposers.proposer import Proposer
from specbatch.pipeline.engines.exact.state.sequence import Sequence


class ReplayProposer(Proposer):
    """Proposes what is known to come; a token is right with probability `acceptance`."""

    name = "replay"

    def __init__(
        self,
        outputs: Mapping[str, Seq[int]],  # by request id
        acceptance: float,
        vocab_size: int,
        seed: int = 0,
    ) -> None:
        self._drafts = {
            name: spoilt(output, acceptance, vocab_size, f"{seed}/{name}")
            for name, output in outputs.items()
        }

    def available(self, sequence: Sequence) -> int:
        return len(self._drafts[sequence.request.request_id]) - sequence.num_output

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        return [
            self._drafts[s.request.request_id][s.num_output : s.num_output + depth]
            for s, depth in zip(sequences, depths, strict=True)
        ]


def spoilt(output: Seq[int], acceptance: float, vocab_size: int, seed: str) -> list[int]:
    """The output with each token right with this probability; the same for the same seed."""
    rng = random.Random(seed)
    return [t if rng.random() < acceptance else (t + 1) % vocab_size for t in output]
