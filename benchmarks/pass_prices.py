"""What modes take where all pay the same for a forward pass of the same size.

On a machine that others use, two modes that do exactly the same differ by some percent: a pass of
one size takes anything from three to fifteen milliseconds, as it happens. What tells modes apart
is which passes they make, and what they do between them. So each pass is counted here at the
median of all passes of its size, whichever mode made them, and all else as it was measured.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from specbatch.kernels.multi_step.contract import Generated
from specbatch.pipeline.engines.exact.model.batch import Chunk
from specbatch.pipeline.engines.exact.model.runner import ModelRunner

Size = tuple[int, int, int]  # sequences, tokens, rows of logits


class TimedRunner(ModelRunner):
    """Notes the size and the seconds of every pass, until they are taken."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._passes: list[tuple[Size, float]] = []
        super().__init__(*args, **options)

    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        begun = time.perf_counter()
        logits = super().forward(chunks)
        seconds = time.perf_counter() - begun
        tokens = sum(len(chunk.token_ids) for chunk in chunks)
        size = len(chunks), tokens, sum(chunk.logit_rows for chunk in chunks)
        self._passes.append((size, seconds))
        return logits

    def generate(self, chunks: Sequence[Chunk], *rest: Any) -> Generated:
        """Passes of one call take equally long: they cannot be timed apart."""
        begun = time.perf_counter()
        generated = super().generate(chunks, *rest)
        seconds = (time.perf_counter() - begun) / max(generated.made)
        for after in range(max(generated.made)):
            left = sum(made > after for made in generated.made)
            self._passes.append(((left, left, left), seconds))
        return generated

    def take_passes(self) -> list[tuple[Size, float]]:
        taken, self._passes = self._passes, []
        return taken


@dataclass(slots=True)
class Spent:
    """Where a mode's seconds went."""

    passes: dict[Size, list[float]] = field(default_factory=lambda: defaultdict(list))
    rest_sec: float = 0.0  # scheduling, looking, drafting, verifying

    def add(self, step_sec: float, passes: Sequence[tuple[Size, float]]) -> None:
        """A step that took so long, and the passes in it."""
        for size, seconds in passes:
            self.passes[size].append(seconds)
            step_sec -= seconds
        self.rest_sec += step_sec

    @property
    def pass_sec(self) -> float:
        return sum(map(sum, self.passes.values()))


def common_prices(spent: Mapping[str, Spent]) -> dict[Size, float]:
    """Seconds of a pass of each size: the median of those of all modes."""
    pooled: dict[Size, list[float]] = defaultdict(list)
    for of_mode in spent.values():
        for size, seconds in of_mode.passes.items():
            pooled[size] += seconds
    return {size: statistics.median(seconds) for size, seconds in pooled.items()}


def priced_sec(spent: Spent, prices: Mapping[Size, float]) -> float:
    """What a mode takes at such prices."""
    return spent.rest_sec + sum(prices[size] * len(s) for size, s in spent.passes.items())
