"""What goes into `verify` and what comes out, whatever implements it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

PLACEHOLDER = -1  # draft token of a row where nothing was drafted: it never matches


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Changes of single logits, before anything else: penalties and biases.

    A logit x becomes (x / scale if x > 0 else x * scale) + add. A (row, token) occurs at most once.
    """

    rows: Tensor  # [num_adjusted] int64, ascending
    tokens: Tensor  # [num_adjusted] int64
    scale: Tensor  # [num_adjusted] float32, above 0; 1 is none
    add: Tensor  # [num_adjusted] float32; 0 is none


@dataclass(frozen=True, slots=True)
class TopRows:
    """Rows whose most likely tokens are wanted as well. Nothing is done for the others."""

    rows: Tensor  # [num_wanted] int64, ascending
    count: int  # tokens per row, 1 or more; a smaller vocabulary gives as many as it has


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters, one entry per row of logits."""

    temperature: Tensor  # [num_rows] float32; 0 is greedy
    top_k: Tensor  # [num_rows] int64; 0 is off
    top_p: Tensor  # [num_rows] float32; 1 is off
    min_p: Tensor  # [num_rows] float32; 0 is off
    forbidden_rows: Tensor  # [num_forbidden] int64, with forbidden_tokens: pairs set to -inf
    forbidden_tokens: Tensor  # [num_forbidden] int64
    # Known on the host, so that unused passes over the logits are never launched.
    any_sampled: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    adjust: Adjustments | None = None
    # A grammar's mask, packed as xgrammar and llguidance do: bit t % 32 of word t // 32 says
    # whether token t may come. Rows without a grammar have all bits set.
    allowed: Tensor | None = None  # [num_rows, ceil(vocab_size / 32)] int32
    top: TopRows | None = None  # for `verify`; `sample` ignores it

    def at(self, rows: Tensor | slice) -> SamplingRows:
        """The parameters of these rows, of which none has anything forbidden or adjusted."""
        return replace(
            self,
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
        )


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The most likely tokens of the wanted rows, by falling unprocessed logit.

    Log-probabilities are those of `Verdict.logprobs`: forbidden and filtered tokens are included.
    Of equal logits the lower token id comes first, so the first n are the same however many are
    asked for. A NaN among the logits sorts as -inf and makes the row's log-probabilities NaN.
    """

    rows: Tensor  # [num_wanted] int64, as in `TopRows`
    tokens: Tensor  # [num_wanted, min(count, vocab_size)] int64
    logprobs: Tensor  # the same shape, float32


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verifier's own token of every row, and how much of each draft it confirms.

    A row has no token to give where its logits are NaN, or where nothing is left of them: every
    token forbidden, masked or at -inf. Its log-probability is NaN then; its token means nothing.
    """

    tokens: Tensor  # [num_rows] int64
    logprobs: Tensor  # [num_rows] float32, of `tokens` under the unprocessed logits
    accepted: Tensor  # [num_seqs] int64, length of the matching prefix
    top: TopTokens | None = None  # where `SamplingRows.top` asked for it
