"""Coupled sampling draws from the verifier's distribution, whatever was drafted; and it couples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from specbatch.kernels.verify.contract import PLACEHOLDER, SamplingRows
from specbatch.kernels.verify.reference import process, sample, verify

DRAWS = 100_000
NONE = torch.tensor([], dtype=torch.int64)


@dataclass(frozen=True)
class Case:
    """Two distributions over a small vocabulary, and how they are sampled."""

    vocab: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    distance: float = 1.0  # of the draft's logits from the verifier's

    @property
    def target(self) -> Tensor:
        return torch.randn(self.vocab, generator=torch.Generator().manual_seed(3)) * 1.5

    @property
    def draft(self) -> Tensor:
        noise = torch.randn(self.vocab, generator=torch.Generator().manual_seed(4))
        return self.target + self.distance * noise

    def sampling(self, rows: int) -> SamplingRows:
        return SamplingRows(
            temperature=torch.full((rows,), self.temperature),
            top_k=torch.full((rows,), self.top_k),
            top_p=torch.full((rows,), self.top_p),
            min_p=torch.full((rows,), self.min_p),
            forbidden_rows=NONE,
            forbidden_tokens=NONE,
            any_sampled=True,
            any_top_k=self.top_k > 0,
            any_top_p=self.top_p < 1,
            any_min_p=self.min_p > 0,
        )

    def probabilities(self, logits: Tensor) -> np.ndarray:
        processed = process(logits[None], self.sampling(1))[0].double()
        law: np.ndarray = processed.softmax(dim=0).numpy()
        return law

    def draw(self, logits: Tensor, counters: Tensor) -> Tensor:
        rows = len(counters)
        return sample(logits.expand(rows, -1), counters, self.sampling(rows))


CASES = [
    pytest.param(Case(7, 1.0), id="7 tokens"),
    pytest.param(Case(7, 0.7, top_p=0.9), id="7 tokens, cooler, top-p"),
    pytest.param(Case(7, 1.8, top_k=4), id="7 tokens, hotter, top-k"),
    pytest.param(Case(32, 1.0), id="32 tokens"),
    pytest.param(Case(32, 0.8, top_p=0.95, distance=0.5), id="32 tokens, top-p"),
    pytest.param(Case(32, 1.3, min_p=0.05, distance=2.0), id="32 tokens, min-p"),
]


def counters(along: str) -> Tensor:
    index = torch.arange(DRAWS)
    if along == "seeds":
        return torch.stack(
            (index * 0x9E3779B97F4A7C1 & (2**63 - 1), torch.zeros_like(index)), dim=1
        )
    return torch.stack((torch.full_like(index, 20_240_607), index), dim=1)


def chi_square(tokens: Tensor, law: np.ndarray) -> float:
    counts = np.bincount(tokens.numpy(), minlength=len(law))
    assert counts[law == 0].sum() == 0, "a dropped token was drawn"
    kept = law > 0
    return float(stats.chisquare(counts[kept], law[kept] / law.sum() * DRAWS).pvalue)


@pytest.mark.parametrize("along", ["seeds", "positions"])
@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_verifier_s_distribution(case: Case, along: str) -> None:
    tokens = case.draw(case.target, counters(along))
    assert chi_square(tokens, case.probabilities(case.target)) > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_the_first_emitted_token_follows_the_verifier_whatever_was_drafted(case: Case) -> None:
    """Draft with the same noise from another distribution, verify, look at what is emitted."""
    at = counters("seeds")
    draft = case.draw(case.draft, at)
    rows = 2 * DRAWS  # the draft's row and the bonus row
    both = torch.stack((at, at + torch.tensor([0, 1])), dim=1).view(rows, 2)
    logits = torch.stack((case.target, case.target.flip(0))).repeat(DRAWS, 1)
    drafts = torch.stack((draft, torch.full_like(draft, PLACEHOLDER)), dim=1).view(rows)
    verdict = verify(logits, drafts, torch.arange(0, rows + 1, 2), both, case.sampling(rows))
    accepted = verdict.accepted.bool()
    own = verdict.tokens[0::2]
    emitted = torch.where(accepted, draft, own)
    assert 0.05 < accepted.float().mean() < 0.999
    assert chi_square(emitted, case.probabilities(case.target)) > 1e-3
    # The bonus token is the next position's own draw, and independent of what went before.
    assert chi_square(verdict.tokens[1::2], case.probabilities(case.target.flip(0))) > 1e-3
    table = np.histogram2d(own.numpy(), verdict.tokens[1::2].numpy(), bins=case.vocab)[0]
    likely = table[table.sum(axis=1) > 500][:, table.sum(axis=0) > 500]
    assert stats.chi2_contingency(likely).pvalue > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_coupling_agrees_as_often_as_promised(case: Case) -> None:
    """At least (1 - TV) / (1 + TV), and never more than the optimum 1 - TV."""
    at = counters("seeds")
    agreed = float((case.draw(case.draft, at) == case.draw(case.target, at)).double().mean())
    p, q = case.probabilities(case.target), case.probabilities(case.draft)
    distance = 0.5 * float(np.abs(p - q).sum())
    sigma = 0.5 / math.sqrt(DRAWS)
    assert agreed >= (1 - distance) / (1 + distance) - 3 * sigma
    assert agreed <= 1 - distance + 3 * sigma
    independent = float(p @ q)
    assert agreed > independent, "no better than sampling apart"


def test_equal_distributions_always_agree() -> None:
    case = Case(32, 0.8, top_p=0.95, distance=0.0)
    at = counters("seeds")
    assert torch.equal(case.draw(case.draft, at), case.draw(case.target, at))
