"""Verification by rejection in plain torch: the definition.

    P_j   distribution of the verifier at row j of a sequence, after temperature, top-k and the like
    Q_j   distribution that the draft token of row j was drawn from; 0 everywhere at the bonus row
    x_j   draft token of row j                u, u_j   uniform on (0, 1)
    γ     draft tokens of a sequence: rows 0 .. γ - 1, and row γ is the bonus row

Both tests emit the accepted draft tokens and then one token of the verifier's own, and what is
emitted follows P, whatever Q is. Unlike `verify`, which tokens these are depends on the draft and
on where the block began: the distribution of an output is kept, not the output.

A row at temperature 0 has all of P_j on the argmax: its draft token is accepted where it is that.

A draft is drawn with stream 0. The tests compare that draft with its own distribution, so they must
not use the noise that made it: they would accept what the noise favours, and the output would
follow neither model. Hence three streams of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from specbatch.kernels.counters.reference import gumbel, philox4x32
from specbatch.kernels.verify.contract import SamplingRows, TopRows, Verdict
from specbatch.kernels.verify.reference import by_row, match_prefix, process, top_tokens

ACCEPT_STREAM = 1  # ratio test: word 0 of the row's counter decides about the row's draft token
RESIDUAL_STREAM = 2  # Gumbel noise of the row's own token: residual, or target at the bonus row
BLOCK_STREAM = 3  # block verification: word j of the first row's counter decides about row j
_MASK = 0xFFFFFFFF
_REJECTED = -2  # equals no token and not PLACEHOLDER

Noise = Callable[[Tensor, int, int], Tensor]  # `gumbel`, or what has its bits


def verify_tokens(
    target_logits: Tensor,  # [num_rows, vocab_size] float32, unprocessed
    draft_probs: Tensor,  # [num_draft_rows, vocab_size] float32: Q of all rows but bonus rows
    draft_tokens: Tensor,  # [num_rows] int64; PLACEHOLDER on each bonus row
    row_offsets: Tensor,  # [num_seqs + 1] int64, rows of sequence i
    counters: Tensor,  # [num_rows, 2] int64: (request key, position)
    sampling: SamplingRows,
    noise: Noise = gumbel,
) -> Verdict:
    """The ratio test, token by token (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318).

        accept x_j           if u_j < P_j(x_j) / Q_j(x_j)
        else draw from       max(P_j - Q_j, 0), normalised

    `tokens` holds the draft before the first rejection and the draw there; rows behind it mean
    nothing. A row depends on no other row, so a proposer may draw with the noise of a token's
    position again after a rejection. Never synchronises with the host.
    """
    p, q = _distributions(target_logits, draft_probs, row_offsets, sampling)
    p_x, q_x = _of_draft(p, draft_tokens), _of_draft(q, draft_tokens)
    u = _uniform(counters, torch.zeros_like(draft_tokens), ACCEPT_STREAM)
    accept = (u * q_x < p_x) & (draft_tokens >= 0)
    accepted = match_prefix(torch.where(accept, draft_tokens, _REJECTED), draft_tokens, row_offsets)
    rows = row_offsets[:-1] + accepted
    left = (p[rows] - q[rows]).clamp_min(0)
    of_batch = (target_logits, draft_tokens, accepted, counters, sampling.top, noise)
    return _emit(left, p[rows], rows, *of_batch)


def verify_blocks(
    target_logits: Tensor,  # [num_rows, vocab_size] float32, unprocessed
    draft_probs: Tensor,  # [num_draft_rows, vocab_size] float32: Q of all rows but bonus rows
    draft_tokens: Tensor,  # [num_rows] int64; PLACEHOLDER on each bonus row
    row_offsets: Tensor,  # [num_seqs + 1] int64, rows of sequence i
    counters: Tensor,  # [num_rows, 2] int64: (request key, position)
    sampling: SamplingRows,
    noise: Noise = gumbel,
) -> Verdict:
    """Block verification (Sun et al., arXiv 2403.10444): a late token may save an early one.

        w_0 = 1,  w_j = min(w_{j-1} P_{j-1}(x_{j-1}) / Q_{j-1}(x_{j-1}), 1)
        R_j = Σ_v max(w_j P_j(v) - Q_j(v), 0)
        h_j = R_j / (R_j + 1 - w_j)
        τ   = the last j with u_j <= h_j;   draw the token of row τ from max(w_τ P_τ - Q_τ, 0)

    It accepts at least as many tokens as the ratio test, on average. At the bonus row Q is 0, so
    that h = w and the draw is the verifier's: one formula for all rows. `tokens` holds the draft
    before τ; rows behind τ mean nothing.

    τ depends on the whole block, also on what comes behind it. So randomness behind τ may not be
    used again: u_j belongs to the block (its first row's counter), and a proposer must not draw
    with the noise of a token's position alone, or the next block's draft would not follow its Q.
    On a GPU it synchronises once with the host, for the longest block.
    """
    p, q = _distributions(target_logits, draft_probs, row_offsets, sampling)
    sequence, within = _positions(row_offsets, draft_tokens)
    p_x, q_x = _of_draft(p, draft_tokens), _of_draft(q, draft_tokens)
    ratio = torch.where(p_x > 0, p_x / q_x, 0.0)
    weight = _weights(ratio, row_offsets)[sequence, within]
    residual = (weight.float()[:, None] * p - q).clamp_min(0)
    mass = by_row(partial(torch.sum, dim=1), residual.double())
    # w = 1 and R = 0 means P = Q there: nothing of it is ever rejected.
    h = torch.where(weight >= 1, 1.0, mass / (mass + 1 - weight))
    u = _uniform(counters[row_offsets[:-1]][sequence], within, BLOCK_STREAM)
    reached = torch.where(u <= h, within, 0)
    accepted = torch.zeros_like(row_offsets[:-1]).scatter_reduce_(0, sequence, reached, "amax")
    rows = row_offsets[:-1] + accepted
    of_batch = (target_logits, draft_tokens, accepted, counters, sampling.top, noise)
    return _emit(residual[rows], p[rows], rows, *of_batch)


def _emit(
    weights: Tensor,  # [num_seqs, vocab_size] float32, the token behind the draft; sum to anything
    p: Tensor,  # [num_seqs, vocab_size] float32: drawn from where all weights are 0
    rows: Tensor,  # [num_seqs] int64, the row of that token
    target_logits: Tensor,  # [num_rows, vocab_size] float32, unprocessed
    draft_tokens: Tensor,  # [num_rows] int64
    accepted: Tensor,  # [num_seqs] int64
    counters: Tensor,  # [num_rows, 2] int64
    top: TopRows | None,
    noise: Noise,
) -> Verdict:
    """Draw the token behind each accepted draft; only these rows need noise."""
    probs = torch.where(weights.sum(dim=1, keepdim=True) > 0, weights, p)
    own = (probs.log() + noise(counters[rows], probs.shape[1], RESIDUAL_STREAM)).argmax(dim=1)
    tokens = draft_tokens.clamp_min(0).index_copy(0, rows, own)
    norm = by_row(partial(torch.logsumexp, dim=1), target_logits)
    logprobs = target_logits.gather(1, tokens[:, None])[:, 0] - norm
    # No draft is accepted where nothing is left, so only a drawn token can stand there.
    nothing_left = p.gather(1, own[:, None])[:, 0].isnan()
    logprobs = logprobs.index_copy(0, rows, logprobs[rows].masked_fill(nothing_left, float("nan")))
    return Verdict(tokens, logprobs, accepted, top_tokens(target_logits, norm, top))


def _distributions(
    target_logits: Tensor, draft_probs: Tensor, row_offsets: Tensor, sampling: SamplingRows
) -> tuple[Tensor, Tensor]:
    """P and Q of every row, float32 [num_rows, vocab_size]; P is NaN where no token is left."""
    num_rows, vocab_size = target_logits.shape
    scores = process(target_logits, sampling)
    best = torch.zeros_like(scores).scatter_(1, scores.argmax(dim=1, keepdim=True), 1.0)
    best = best.masked_fill(scores.amax(dim=1, keepdim=True) == float("-inf"), float("nan"))
    p = torch.where((sampling.temperature > 0)[:, None], scores.softmax(dim=1), best)
    # Draft rows are the rows less the bonus rows before them; bonus rows take the zeros at the end.
    rows = torch.arange(num_rows, device=target_logits.device)
    sequence = torch.searchsorted(row_offsets, rows, right=True) - 1
    is_bonus = rows == row_offsets[sequence + 1] - 1
    padded = torch.cat((draft_probs, draft_probs.new_zeros(1, vocab_size)))
    return p, padded[torch.where(is_bonus, draft_probs.shape[0], rows - sequence)]


def _positions(row_offsets: Tensor, draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence of every row and its position j within it, int64 [num_rows] each."""
    rows = torch.arange(draft_tokens.shape[0], device=draft_tokens.device)
    sequence = torch.searchsorted(row_offsets, rows, right=True) - 1
    return sequence, rows - row_offsets[sequence]


def _of_draft(probs: Tensor, draft_tokens: Tensor) -> Tensor:
    """The probability of each draft token, float64 [num_rows]; bonus rows mean nothing."""
    return probs.gather(1, draft_tokens.clamp_min(0)[:, None])[:, 0].double()


def _weights(ratio: Tensor, row_offsets: Tensor) -> Tensor:
    """w of every sequence, float64 [num_seqs, rows of the longest].

    A loop over positions and not a scan over rows: a row's bits must not depend on other sequences.
    """
    first = row_offsets[:-1]
    longest = int((row_offsets[1:] - first).max()) if first.numel() else 0
    columns = [torch.ones_like(first, dtype=torch.float64)]
    for j in range(longest - 1):
        at = (first + j).clamp_max(ratio.shape[0] - 1)
        columns.append((columns[-1] * ratio[at]).clamp_max(1.0))
    return torch.stack(columns, dim=1)


def _uniform(counters: Tensor, index: Tensor, stream: int) -> Tensor:
    """Word `index` of each counter as a float64 inside (0, 1), which float32 would round to 1."""
    keys, zero = counters[:, 0], torch.zeros_like(index)
    words = philox4x32(
        (index // 4, counters[:, 1] & _MASK, zero + stream, zero),
        (keys & _MASK, (keys >> 32) & _MASK),
    )
    word = torch.stack(words, dim=1).gather(1, (index % 4)[:, None])[:, 0]
    return (word.double() + 0.5) * 2.0**-32
