"""The naive decoder: one sequence, and the whole of it fed anew for every token."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from engine.decoding import runner_of

from specbatch.kernels.verify.contract import PLACEHOLDER
from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.engines.exact.model.batch import Chunk
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.exact.sampling.sampler import choose_sampler
from specbatch.pipeline.engines.exact.sampling.sampling import sampling_rows
from specbatch.pipeline.engines.state.kv_blocks import KvState
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.records import FinishReason
from support.engines import loaded


def decode(verifier: Path, request: Request, dtype: str = "float32") -> Sequence:
    """No scheduler, no cache that outlives a pass, no drafts: a model and a sampler in a loop."""
    runner = _runner(verifier, dtype)
    sampler, params = choose_sampler(runner.device), request.params
    ends = (frozenset() if params.ignore_eos else runner.eos_ids) | {*params.stop_token_ids}
    row = Sequence(request, ends, max_length=len(request.prompt_ids) + params.max_tokens)
    while row.finish_reason is None:
        kv = KvState()
        runner.blocks.grow(kv, len(row.tokens))
        logits = runner.forward([Chunk(kv, row.tokens, 1)])
        runner.blocks.release(kv)
        sampling, counters = sampling_rows([row], [1], logits.device)
        verdict = sampler.verify(
            logits, torch.tensor([PLACEHOLDER]), torch.tensor([0, 1]), counters, sampling
        )
        token = int(verdict.tokens[0])
        row.tokens.append(token)
        row.logprobs.append(float(verdict.logprobs[0]))
        if row.adjuster is not None:
            row.adjuster.append(token)
        if token in ends or (row.ends_text is not None and row.ends_text(token)):
            row.finish_reason = FinishReason.STOP
        elif row.num_output == params.max_tokens:
            row.finish_reason = FinishReason.LENGTH
    return row


@lru_cache(maxsize=4)
def _runner(verifier: Path, dtype: str) -> ModelRunner:
    return runner_of(loaded(verifier, dtype), 16, share_prefixes=False)
