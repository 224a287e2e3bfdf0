"""What is minimised: completions alone, by the token and by what is known of its rivals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from specbatch.pipeline.learning.datasets import Example
from specbatch.pipeline.learning.objective import batch_of, batches, logits_of, loss_of, matches

VOCABULARY = 23


class Table(torch.nn.Module):
    """Next-token logits by the token before: a model whose loss can be written down."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.table = torch.nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator))

    def forward(self, input_ids: Tensor, use_cache: bool, logits_to_keep: Tensor) -> Any:
        assert not use_cache
        return SimpleNamespace(logits=self.table[input_ids][:, logits_to_keep])


def example(seed: int, n: int = 3, top: bool = True) -> Example:
    draw = np.random.default_rng(seed)
    prompt, tokens = int(draw.integers(1, 9)), int(draw.integers(1, 12))
    ids = draw.integers(0, VOCABULARY, prompt + tokens).astype(np.int32)
    rivals = np.array([draw.permutation(VOCABULARY)[:n] for _ in range(tokens)], dtype=np.int32)
    probs = np.sort(draw.dirichlet(np.ones(n + 1), tokens)[:, :n])[:, ::-1]
    return Example(
        digest=bytes([seed]),
        prompt_digest=bytes([seed]),
        ids=ids,
        prompt_tokens=prompt,
        top_ids=rivals if top else None,
        top_logprobs=np.log(probs).astype(np.float32) if top else None,
    )


EXAMPLES = [example(i, n=2 + i % 3, top=i % 4 != 0) for i in range(12)]


def naive(model: Table, examples: list[Example], distill: float) -> Tensor:
    """Position by position."""
    total, positions = torch.zeros(()), 0
    for one in examples:
        for place in range(one.prompt_tokens, len(one.ids)):
            log_q = torch.log_softmax(model.table[int(one.ids[place - 1])], -1)
            loss = -log_q[int(one.ids[place])]
            at = place - one.prompt_tokens
            if one.top_ids is not None and one.top_logprobs is not None:
                ids = torch.tensor(one.top_ids[at].astype(np.int64))
                probs = torch.tensor(np.exp(one.top_logprobs[at]))
                others = [i for i in range(VOCABULARY) if i not in ids]
                kl = -(probs * log_q[ids]).sum()
                kl = kl - (1 - probs.sum()) * torch.log(torch.exp(log_q[others]).sum())
                loss = (1 - distill) * loss + distill * kl
            total, positions = total + loss, positions + 1
    return total / positions


@pytest.mark.parametrize("distill", [0.0, 0.5, 1.0])
def test_the_loss_is_the_mean_over_positions(distill: float) -> None:
    model = Table()
    wanted = naive(model, EXAMPLES, distill)
    wanted_gradient = torch.autograd.grad(wanted, model.table)[0]
    batch = batch_of(EXAMPLES, "cpu")
    loss = loss_of(logits_of(model, batch), batch, distill)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(torch.autograd.grad(loss, model.table)[0], wanted_gradient)


def test_without_rivals_it_is_plain_cross_entropy() -> None:
    model, one = Table(), example(0, top=False)
    batch = batch_of([one], "cpu")
    ids = torch.tensor(one.ids.astype(np.int64))
    begin = one.prompt_tokens
    wanted = functional.cross_entropy(model.table[ids[begin - 1 : -1]], ids[begin:])
    torch.testing.assert_close(loss_of(logits_of(model, batch), batch, 1.0), wanted)


def test_where_all_is_the_recorded_one_nothing_is_left_to_learn() -> None:
    """The gradient of the divergence is 0 at the verifier's own probabilities."""
    model, one = Table(), example(5)
    log_q = torch.log_softmax(model.table.detach(), -1)
    before = one.ids[one.prompt_tokens - 1 : -1].astype(np.int64)
    assert one.top_ids is not None
    rows = log_q[torch.tensor(before)]
    top = rows.gather(1, torch.tensor(one.top_ids.astype(np.int64)))
    same = Example(one.digest, one.prompt_digest, one.ids, one.prompt_tokens,
                   one.top_ids, top.numpy())  # fmt: skip
    batch = batch_of([same], "cpu")
    loss = loss_of(logits_of(model, batch), batch, 1.0)
    gradient = torch.autograd.grad(loss, model.table)[0]
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-6, rtol=0)


@pytest.mark.parametrize("tokens", [1, 20, 60, 10_000])
def test_batches_keep_to_the_budget_and_hold_each_example_once(tokens: int) -> None:
    found = batches(EXAMPLES, tokens, seed=1, epoch=0)
    assert sorted(i for batch in found for i in batch) == list(range(len(EXAMPLES)))
    for batch in found:
        padded = len(batch) * max(len(EXAMPLES[i].ids) for i in batch)
        assert padded <= tokens or len(batch) == 1


def test_the_order_follows_from_seed_and_epoch() -> None:
    orders = {
        (seed, epoch): batches(EXAMPLES, 60, seed, epoch) for seed in (0, 1) for epoch in (0, 1)
    }
    assert len({str(order) for order in orders.values()}) == 4
    assert all(batches(EXAMPLES, 60, *key) == order for key, order in orders.items())


def test_matches_are_of_each_example_s_own_completion() -> None:
    model = Table()
    found = {one.digest: match for one, match in matches(model, EXAMPLES, 50, "cpu")}
    for one in EXAMPLES:
        begin = one.prompt_tokens
        before = torch.tensor(one.ids[begin - 1 : -1].astype(np.int64))
        wanted = model.table[before].argmax(-1).numpy() == one.ids[begin:]
        assert found[one.digest].tolist() == wanted.tolist()
