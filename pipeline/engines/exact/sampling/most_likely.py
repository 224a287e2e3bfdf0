"""The most likely tokens of a verdict, dealt out to the sequences that asked for them."""

from __future__ import annotations

from specbatch.kernels.verify.contract import TopTokens
from specbatch.pipeline.engines.exact.state.sequence import Sequence
from specbatch.schemas.records import TopLogprobs


class MostLikely:
    """Reads the tensors once per step."""

    def __init__(self, top: TopTokens) -> None:
        self._slots = {row: slot for slot, row in enumerate(top.rows.tolist())}
        self._tokens, self._logprobs = top.tokens.tolist(), top.logprobs.tolist()

    def of(self, sequence: Sequence, begin: int, end: int) -> list[TopLogprobs]:
        """Those of rows begin .. end - 1, as many as the sequence's request wants; [] for none."""
        count = sequence.request.params.top_logprobs
        if not count:
            return []
        slots = [self._slots[row] for row in range(begin, end)]
        return [(tuple(self._tokens[s][:count]), tuple(self._logprobs[s][:count])) for s in slots]
