"""Rechecks a sample of finished completions, for engines whose bits may depend on the batch.

`exactness: fast` promises no bits, so it has to measure what that costs. One completion in 64,
chosen by its request id, is fed again, alone: each of its tokens is compared with what the verifier
decides after the tokens before it. A difference means that another batch would have led to another
text from there on.

The recheck takes a whole text in one pass, which costs a hundredth of a job's time. Token by token,
as depth 0 decides, it would cost a tenth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specbatch.kernels.counters.reference import gumbel
from specbatch.kernels.verify.reference import process
from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.engines.exact.model.batch import Chunk
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.exact.sampling.sampler import choose_sampler
from specbatch.pipeline.engines.exact.sampling.sampling import sampling_rows
from specbatch.pipeline.engines.recheck_sample import ONE_IN, is_chosen
from specbatch.pipeline.engines.state.kv_blocks import KvState
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.records import Recheck, Verification

_PIECE_TOKENS = 256  # rows of logits held at a time


@dataclass(frozen=True, slots=True)
class Difference:
    """A token that is not the one the verifier decides at its position."""

    position: int  # in the output, from 0
    written: int
    decided: int
    score_gap: float  # between the scores of both: processed logits plus noise
    margin: float  # in logits: how little would have to change for the written one to be decided


class Rechecker:
    """Uses the verifier's own runner, while the engine is between two steps."""

    def __init__(self, runner: ModelRunner, one_in: int = ONE_IN) -> None:
        self._runner = runner
        self._sampler = choose_sampler(runner.device, runner.kernels)
        self._one_in = one_in

    def wants(self, request: Request) -> bool:
        return is_chosen(request, self._one_in)

    def check(self, done: Sequence) -> Recheck | None:
        """Compare the tokens of a finished sequence; None if there are no blocks for it now.

        None for ratio tests too: they never promised the coupled sample.
        """
        if done.verification is not Verification.COUPLED:
            return None
        found = self.differences(done)
        if found is None:
            return None
        largest = max((difference.score_gap for difference in found), default=0.0)
        return Recheck(len(done.output), len(found), largest)

    @torch.inference_mode()
    def differences(self, done: Sequence) -> list[Difference] | None:
        """Where a sequence's output is not what the verifier decides, by one prefill.

        None if there is no output, or there are no blocks for it now.
        """
        blocks, kv = self._runner.blocks, KvState()
        if not done.output or blocks.missing_blocks(kv, len(done.tokens)) > blocks.free_blocks:
            return None
        blocks.grow(kv, len(done.tokens))  # neither adopted nor sealed: all of it is computed here
        try:
            return self._differences(done, kv)
        finally:
            blocks.release(kv)

    def _differences(self, done: Sequence, kv: KvState) -> list[Difference]:
        request, output = done.request, done.output
        fresh = Sequence(replace(request, watch_text=None), done.stop_ids, done.max_length)
        prompt = request.prompt_ids
        for at in range(0, len(prompt) - 1, _PIECE_TOKENS):
            part = prompt[at : min(at + _PIECE_TOKENS, len(prompt) - 1)]
            self._runner.forward([Chunk(kv, part, 0)])
        fed = [prompt[-1], *output[:-1]]
        found = []
        for first in range(0, len(output), _PIECE_TOKENS):
            piece = fed[first : first + _PIECE_TOKENS]
            logits = self._runner.forward([Chunk(kv, piece, len(piece))])
            rows, counters = sampling_rows([fresh], [len(piece)], logits.device, [output], first)
            decided = self._sampler.sample(logits, counters, rows).tolist()
            found += [
                _difference(fresh, logits[row], output, first + row, token)
                for row, token in enumerate(decided)
                if token != output[first + row]
            ]
        return found


def _difference(
    fresh: Sequence, logits: Tensor, output: list[int], position: int, decided: int
) -> Difference:
    """Scores are compared before top-k, top-p and min-p, which move what they drop infinitely far
    away."""
    rows, counters = sampling_rows([fresh], [1], logits.device, [output], position)
    written = output[position]
    kept = torch.isfinite(process(logits[None], rows)[0])
    whole = process(logits[None], replace(rows, any_top_k=False, any_top_p=False, any_min_p=False))
    before = scores = whole[0]
    if rows.any_sampled:
        scores = scores + gumbel(counters, len(scores))[0]
    lead = float(scores[decided] - scores[written])
    least_kept = float(before[kept].min())
    if kept[written]:  # the other one must fall behind it, or be dropped
        margin = lead
        if bool((torch.isfinite(before) & ~kept).any()):
            margin = min(lead, float(before[decided]) - least_kept)
    else:  # it must be kept, and not fall behind then
        margin = max(least_kept - float(before[written]), lead)
    temperature = fresh.request.params.temperature or 1.0
    return Difference(position, written, decided, abs(lead), margin * temperature)
