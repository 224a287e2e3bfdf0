"""Batches of examples, and what a draft model is trained to minimise on them.

The target at a position is the verifier's token, mixed with the recorded probabilities of the most
likely tokens and of all others together where those are kept. Only positions of completions count.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specbatch.pipeline.learning.datasets import Example

_BUCKET = 1.25  # lengths of one bucket differ by less than this factor
_NOTHING = -1e4  # a log-probability of nothing, and finite: 0 × it is 0


def batches(examples: Sequence[Example], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indexes of one epoch's batches, in a random order that follows from seed and epoch.

    A batch has at most so many tokens with its padding, or one example.
    """
    draw = random.Random(f"{seed}/{epoch}")
    order = list(range(len(examples)))
    draw.shuffle(order)
    order.sort(key=lambda i: int(np.log(len(examples[i].ids)) / np.log(_BUCKET)))
    found: list[list[int]] = []
    longest = 0
    for i in order:
        longest = max(longest, len(examples[i].ids)) if found else len(examples[i].ids)
        if not found or longest * (len(found[-1]) + 1) > tokens:
            found.append([])
            longest = len(examples[i].ids)
        found[-1].append(i)
    draw.shuffle(found)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Examples side by side, padded at their ends. Rows of completions are flat: [targets]."""

    ids: Tensor  # [examples, length]
    rows: Tensor  # which example a target is of
    places: Tensor  # and the position whose logits decide it
    tokens: Tensor
    top_ids: Tensor  # [targets, n]
    top_probs: Tensor  # [targets, n]; 0 where nothing is recorded
    has_top: Tensor  # 1 where something is

    @property
    def first(self) -> int:
        """The first position whose logits are needed."""
        return int(self.places.min())


def batch_of(examples: Sequence[Example], device: str) -> Batch:
    length = max(len(one.ids) for one in examples)
    widest = max([1, *(one.top_ids.shape[1] for one in examples if one.top_ids is not None)])
    ids = np.zeros((len(examples), length), dtype=np.int64)
    flat: dict[str, list[npt.NDArray[Any]]] = {
        name: [] for name in Batch.__slots__ if name != "ids"
    }
    for row, one in enumerate(examples):
        ids[row, : len(one.ids)] = one.ids
        for name, values in _targets(row, one, widest).items():
            flat[name].append(values)
    tensors = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in flat.items()}
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    return Batch(ids=torch.from_numpy(ids).to(device), **moved)


def _targets(row: int, one: Example, widest: int) -> dict[str, npt.NDArray[Any]]:
    n = one.completion_tokens
    top_ids = np.zeros((n, widest), dtype=np.int64)
    top_probs = np.zeros((n, widest), dtype=np.float32)
    if one.top_ids is not None and one.top_logprobs is not None:
        top_ids[:, : one.top_ids.shape[1]] = one.top_ids
        top_ids[:, one.top_ids.shape[1] :] = one.top_ids[:, :1]
        top_probs[:, : one.top_ids.shape[1]] = np.exp(one.top_logprobs)
    return {
        "rows": np.full(n, row, dtype=np.int64),
        "places": np.arange(one.prompt_tokens - 1, len(one.ids) - 1, dtype=np.int64),
        "tokens": one.ids[one.prompt_tokens :].astype(np.int64),
        "top_ids": top_ids,
        "top_probs": top_probs,
        "has_top": np.full(n, one.top_ids is not None, dtype=np.float32),
    }


def logits_of(model: Any, batch: Batch) -> Tensor:
    """The model's logits where it decides a target, [targets, vocabulary]."""
    keep = torch.arange(batch.first, batch.ids.shape[1] - 1, device=batch.ids.device)
    logits = model(input_ids=batch.ids, use_cache=False, logits_to_keep=keep).logits
    chosen: Tensor = logits[batch.rows, batch.places - batch.first].float()
    return chosen


def loss_of(logits: Tensor, batch: Batch, distill: float) -> Tensor:
    """The mean over the targets."""
    log_q = torch.log_softmax(logits, dim=-1)
    of_token = -log_q.gather(1, batch.tokens[:, None])[:, 0]
    share = distill * batch.has_top
    mixed = of_token * (1 - share)
    if distill:
        mixed = mixed + share * _cross_entropy(log_q, batch)
    return mixed.mean()


def _cross_entropy(log_q: Tensor, batch: Batch) -> Tensor:
    """Of the recorded probabilities and of the rest's mass: their KL divergence, but for what the
    model has no part in."""
    of_top = -(batch.top_probs * log_q.gather(1, batch.top_ids)).sum(-1)
    rest = (1 - batch.top_probs.sum(-1)).clamp(min=0)
    others = log_q.scatter(1, batch.top_ids, _NOTHING)
    return of_top - rest * torch.logsumexp(others, dim=-1)


@torch.no_grad()
def matches(
    model: Any, examples: Sequence[Example], tokens: int, device: str
) -> Iterator[tuple[Example, npt.NDArray[np.bool_]]]:
    """Of each example, where the model's most likely token is the verifier's."""
    for chosen in batches(examples, tokens, seed=0, epoch=0):
        some = [examples[i] for i in chosen]
        batch = batch_of(some, device)
        right = (logits_of(model, batch).argmax(-1) == batch.tokens).cpu().numpy()
        begin = 0
        for one in some:
            yield one, right[begin : begin + one.completion_tokens]
            begin += one.completion_tokens
