"""Verification by coupled sampling in plain torch: the definition.

    token(i) = argmax_v [ processed_logits_i(v) / temperature + gumbel(seed, i, v) ]

A draft token is accepted when it equals the verifier's own token and all before it did. The same
noise drives a proposer's sampling, which is what makes agreement likely (Gumbel coupling: Daliri,
Musco, Suresh, arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from specbatch.kernels.counters.reference import gumbel
from specbatch.kernels.verify.contract import (
    Adjustments,
    SamplingRows,
    TopRows,
    TopTokens,
    Verdict,
)

_MIN_TEMPERATURE = 1e-6  # keeps greedy rows finite where sampled rows share the batch


def verify(
    target_logits: Tensor,  # [num_rows, vocab_size] float32, unprocessed
    draft_tokens: Tensor,  # [num_rows] int64; PLACEHOLDER on each bonus row
    row_offsets: Tensor,  # [num_seqs + 1] int64, rows of sequence i
    counters: Tensor,  # [num_rows, 2] int64: (request key, position)
    sampling: SamplingRows,
) -> Verdict:
    """Sample every row with its counter's Gumbel noise; keep the matching prefix.

    Same counters and logits give the same tokens, whatever the batch.
    """
    scores = process(target_logits, sampling)
    tokens = _choose(scores, counters, sampling)
    norm = by_row(partial(torch.logsumexp, dim=1), target_logits)
    logprobs = _at(target_logits, tokens) - norm
    logprobs = logprobs.masked_fill(_at(scores, tokens) == float("-inf"), float("nan"))
    accepted = match_prefix(tokens, draft_tokens, row_offsets)
    return Verdict(tokens, logprobs, accepted, top_tokens(target_logits, norm, sampling.top))


def by_row(reduce: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """`reduce` of rows, [n, m] to [n]. torch shares out a lone long row among threads, and so
    adds it in another order than the same row beside others."""
    return reduce(rows) if len(rows) != 1 else reduce(rows.expand(2, -1).contiguous())[:1]


def sample(
    logits: Tensor,  # [num_rows, vocab_size] float32, unprocessed
    counters: Tensor,  # [num_rows, 2] int64
    sampling: SamplingRows,
) -> Tensor:
    """The token of every row, int64 [num_rows]."""
    return _choose(process(logits, sampling), counters, sampling)


def _choose(scores: Tensor, counters: Tensor, sampling: SamplingRows) -> Tensor:
    if sampling.any_sampled:
        noise = gumbel(counters, scores.shape[1])
        sampled = (sampling.temperature > 0)[:, None]
        scores = torch.where(sampled, scores + noise, scores)
    return scores.argmax(dim=1)


def running_sum(x: Tensor) -> Tensor:
    """Of every row, its first element included; [num_rows, n] as x."""
    return x.cumsum(dim=1)


def process(
    logits: Tensor, sampling: SamplingRows, sums: Callable[[Tensor], Tensor] = running_sum
) -> Tensor:
    """Penalties and bias, forbidden tokens, grammar mask, temperature, top-k, top-p, min-p.

    In this order. Dropped tokens are -inf. `sums` may be another way to `running_sum`.
    """
    scores = logits
    if sampling.adjust is not None:
        scores = adjusted(scores, sampling.adjust)
    if sampling.forbidden_rows.numel():
        scores = scores.clone()
        scores[sampling.forbidden_rows, sampling.forbidden_tokens] = float("-inf")
    if sampling.allowed is not None:
        scores = scores.masked_fill(~unpacked(sampling.allowed, scores.shape[1]), float("-inf"))
    if not sampling.any_sampled:
        return scores
    sampled = sampling.temperature > 0
    scale = torch.where(sampled, sampling.temperature.clamp_min(_MIN_TEMPERATURE), 1.0)
    scores = scores / scale[:, None]
    if sampling.any_top_k:
        scores = _keep_top_k(scores, sampling.top_k)
    if sampling.any_top_p:
        scores = _keep_top_p(scores, sampling.top_p, sums)
    if sampling.any_min_p:
        floor = scores.amax(dim=1) + sampling.min_p.log()  # log 0 is -inf: keeps all
        scores = scores.masked_fill(scores < floor[:, None], float("-inf"))
    return scores


def unpacked(allowed: Tensor, vocab_size: int) -> Tensor:
    """A packed mask as bool [num_rows, vocab_size]; bits behind the vocabulary mean nothing."""
    bits = torch.arange(32, dtype=torch.int32, device=allowed.device)
    return ((allowed[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocab_size]


def top_tokens(
    logits: Tensor,  # [num_rows, vocab_size] float32, unprocessed
    norm: Tensor,  # [num_rows] float32: log-sum-exp of each row
    top: TopRows | None,
) -> TopTokens | None:
    """As `TopTokens` says; None where no row asks."""
    if top is None:
        return None
    wanted = logits[top.rows]
    ordered = wanted.masked_fill(wanted.isnan(), float("-inf"))
    tokens = ordered.sort(dim=1, descending=True, stable=True).indices[:, : top.count]
    return TopTokens(top.rows, tokens, wanted.gather(1, tokens) - norm[top.rows][:, None])


def match_prefix(tokens: Tensor, draft_tokens: Tensor, row_offsets: Tensor) -> Tensor:
    """Rows before the first disagreement, per sequence: int64 [num_seqs].

    The last row of every sequence holds PLACEHOLDER, so each has a disagreement to find.
    """
    num_rows = tokens.shape[0]
    rows = torch.arange(num_rows, device=tokens.device)
    disagreement = torch.where(tokens == draft_tokens, num_rows, rows)
    nearest = disagreement.flip(0).cummin(0).values.flip(0)
    first = row_offsets[:-1]
    return nearest[first] - first


def _at(values: Tensor, tokens: Tensor) -> Tensor:
    """The value at each row's token: [num_rows]."""
    return values.gather(1, tokens[:, None])[:, 0]


def adjusted(logits: Tensor, adjust: Adjustments) -> Tensor:
    """Logits with every entry's scale and addition in them."""
    at = (adjust.rows, adjust.tokens)
    x = logits[at]
    scores = logits.clone()
    scores[at] = torch.where(x > 0, x / adjust.scale, x * adjust.scale) + adjust.add
    return scores


def _keep_top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    vocab_size = scores.shape[1]
    k = torch.where(top_k > 0, top_k.clamp_max(vocab_size), vocab_size)
    ordered = scores.sort(dim=1, descending=True).values
    floor = ordered.gather(1, (k - 1)[:, None])
    return scores.masked_fill(scores < floor, float("-inf"))


def _keep_top_p(scores: Tensor, top_p: Tensor, sums: Callable[[Tensor], Tensor]) -> Tensor:
    """The smallest set of most likely tokens whose probability reaches top_p; never empty."""
    ordered, index = scores.sort(dim=1, descending=True, stable=True)
    probability = ordered.softmax(dim=1)
    before = sums(probability) - probability
    # A row with top_p 1 keeps everything, rounding of the sum included.
    dropped = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    return scores.masked_fill(torch.zeros_like(dropped).scatter(1, index, dropped), float("-inf"))
