"""Contenders of a benchmark: ways to complete prompts, of this engine and of transformers.

Unless stated otherwise every contender completes the same prompts greedily with exactly
`NEW_TOKENS` tokens each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from specbatch.jobs.bench.contenders import OURS, Completed, Ours, Prompts, timed
from specbatch.jobs.bench.huggingface import DRAFTED, ENGINE, Transformers
from specbatch.jobs.bench.models import BenchModel

NEW_TOKENS = 128
PROMPT_TOKENS = 64
DEPTH_0 = "depth 0"
REPLAYED = (0.0, 0.5, 0.7, 0.9)


@dataclass(frozen=True, slots=True)
class Contender:
    """A way of completing prompts; `engine` groups the ways of one engine."""

    name: str
    engine: str
    complete: Callable[[Prompts], Completed]
    only_n: int | None = None


def our_contenders(ours: Ours, shares: Sequence[float] = REPLAYED) -> list[Contender]:
    """All contenders, depth 0 first, because the others replay its output."""
    replayed = [
        Contender(
            f"replay {share} auto", OURS, partial(ours.complete, depth=None, acceptance=share)
        )
        for share in shares
    ]
    return [Contender(DEPTH_0, OURS, ours.complete), *replayed]


def transformers_contenders(
    model: BenchModel, dtype: torch.dtype, device: str = "cpu"
) -> list[Contender]:
    """Assisted generation and prompt lookup take one prompt only."""
    paths = Transformers(model.folder, dtype, NEW_TOKENS, device, draft=model.draft)
    lookup = partial(paths.generate, prompt_lookup_num_tokens=DRAFTED)
    assisted = partial(paths.generate, assistant_model=paths.draft)
    return [
        Contender("generate", ENGINE, timed(paths.generate)),
        Contender("generate_batch", ENGINE, timed(paths.generate_batch)),
        Contender("prompt_lookup", ENGINE, timed(lookup), only_n=1),
        Contender("assisted", ENGINE, timed(assisted), only_n=1),
    ]


def random_prompts(model: BenchModel, count: int) -> Prompts:
    """Fixed random prompts of `PROMPT_TOKENS`; the first `count` of one list."""
    rng = random.Random(0)
    return [
        [rng.randrange(3, model.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)
    ]
