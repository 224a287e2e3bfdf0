"""A sampled second look at finished completions, for engines whose bits may depend on the batch.

`exactness: fast` promises no bits, so it has to say what that cost. One completion in 64, chosen by
its request id, is fed once more: alone, its own tokens given, and each token is compared with what
the verifier decides after the tokens before it. A difference tells that another batch would have
led to another text from there on.

The second look takes a whole text in one pass, which costs a hundredth of a job's time. Token by
token, as depth 0 alone would decide it, it would be a tenth.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from torch import Tensor

from specbatch.kernels.counters.reference import gumbel
from specbatch.kernels.verify.reference import process
from specbatch.pipeline.engine.batch import Chunk
from specbatch.pipeline.engine.blocks import KvState
from specbatch.pipeline.engine.runner import ModelRunner
from specbatch.pipeline.engine.sampler import choose_sampler
from specbatch.pipeline.engine.sampling import sampling_rows
from specbatch.pipeline.engine.sequence import Request, Sequence
from specbatch.schemas.records import Recheck

ONE_IN = 64
_PIECE_TOKENS = 256  # rows of logits held at a time


class Rechecker:
    """Looks again, with the verifier's own runner, while the engine is between two steps."""

    def __init__(self, runner: ModelRunner, one_in: int = ONE_IN) -> None:
        self._runner = runner
        self._sampler = choose_sampler(runner.device)
        self._one_in = one_in

    def wants(self, request: Request) -> bool:
        """A pure function of the request's id: a retry looks at the same ones."""
        if request.decided_ids:  # not all of its output is this engine's
            return False
        digest = hashlib.sha256(request.request_id.encode()).digest()
        return int.from_bytes(digest[:8], "big") % self._one_in == 0

    @torch.inference_mode()
    def check(self, done: Sequence) -> Recheck | None:
        """Compare the tokens of a finished sequence; None when there are no blocks for it now."""
        blocks, kv = self._runner.blocks, KvState()
        if not done.output or blocks.missing_blocks(kv, len(done.tokens)) > blocks.free_blocks:
            return None
        blocks.grow(kv, len(done.tokens))  # neither adopted nor sealed: all of it is computed here
        try:
            return self._check(done, kv)
        finally:
            blocks.release(kv)

    def _check(self, done: Sequence, kv: KvState) -> Recheck:
        request, output = done.request, done.output
        fresh = Sequence(replace(request, watch_text=None), done.stop_ids, done.max_length)
        prompt = request.prompt_ids
        for at in range(0, len(prompt) - 1, _PIECE_TOKENS):
            part = prompt[at : min(at + _PIECE_TOKENS, len(prompt) - 1)]
            self._runner.forward([Chunk(kv, part, 0)])
        fed = [prompt[-1], *output[:-1]]
        margins = []
        for first in range(0, len(output), _PIECE_TOKENS):
            piece = fed[first : first + _PIECE_TOKENS]
            logits = self._runner.forward([Chunk(kv, piece, len(piece))])
            rows, counters = sampling_rows([fresh], [len(piece)], logits.device, [output], first)
            decided = self._sampler.sample(logits, counters, rows).tolist()
            margins += [
                self._margin(fresh, logits[row], output, first + row, token)
                for row, token in enumerate(decided)
                if token != output[first + row]
            ]
        return Recheck(len(output), len(margins), max(margins, default=0.0))

    @staticmethod
    def _margin(
        fresh: Sequence, logits: Tensor, output: list[int], position: int, decided: int
    ) -> float:
        """Before top-k, top-p and min-p, which would put what they drop infinitely far away."""
        rows, counters = sampling_rows([fresh], [1], logits.device, [output], position)
        rows = replace(rows, any_top_k=False, any_top_p=False, any_min_p=False)
        scores = process(logits[None], rows)[0]
        if rows.any_sampled:
            scores = scores + gumbel(counters, len(scores))[0]
        return abs(float(scores[decided] - scores[output[position]]))
