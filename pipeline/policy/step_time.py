"""What a verifier pass costs, by its tokens and sequences: learned while it runs.

    seconds ≈ (base + row · tokens + sequence · sequences) · correction(tokens)

The linear part tells what has never been tried. The correction is learned per range of sizes, for
machines do not work in single tokens: tiles, cache sizes and captured graphs make steps, and the
best place is usually the right end of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specbatch.pipeline.policy.linear_cost import LinearCost

_FADE = 0.95  # of a range's older corrections, per observation
_DOUBT = 1.0  # a range's own evidence counts fully only beside so many observations
_KNOWN = 3.0  # observations of a range, before one far above them is cut
_CLIP = 1.5
_DRAFTED_ENOUGH = 3  # passes with more tokens than sequences, before a token's price is known
_FIRST_GUESS = (2e-3, 5e-5, 0.0)


def _ranges(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers of the ranges that sizes fall into: 8 tokens wide up to 128, then 32."""
    return np.where(tokens <= 128, (tokens + 7) // 8, 16 + (tokens - 97) // 32)


@dataclass(slots=True)
class StepTime:
    """Fitted online; see the module. Times are seconds."""

    linear: LinearCost = field(default_factory=lambda: LinearCost(list(_FIRST_GUESS)))
    drafted: int = 0  # observations that tell a token's price from a sequence's
    _weight: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    _excess: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # weighted

    @property
    def observations(self) -> int:
        return self.linear.observations

    @property
    def has_slope(self) -> bool:
        """Whether the price of a further token has been measured."""
        return self.drafted >= _DRAFTED_ENOUGH

    def observe(self, tokens: int, sequences: int, seconds: float) -> None:
        sizes = (1.0, tokens, sequences)
        place = (tokens + 7) // 8 if tokens <= 128 else 16 + (tokens - 97) // 32
        if place >= len(self._weight):
            more = place + 16 - len(self._weight)
            self._weight = np.pad(self._weight, (0, more))
            self._excess = np.pad(self._excess, (0, more))
        if self._weight[place] >= _KNOWN:  # what is known is not overturned by one slow step
            seconds = min(seconds, _CLIP * self._expected(sizes, place))
        seconds = self.linear.observe(sizes, seconds)
        self.drafted += tokens > sequences
        ratio = seconds / max(self.linear.predict(sizes), 1e-9)
        self._weight[place] = self._weight[place] * _FADE + 1.0
        self._excess[place] = self._excess[place] * _FADE + (ratio - 1.0)

    def _expected(self, sizes: tuple[float, ...], place: int) -> float:
        correction = self._excess[place] / (self._weight[place] + _DOUBT)
        return float(self.linear.predict(sizes) * (1.0 + correction))

    def predict(self, tokens: int, sequences: int) -> float:
        return float(self.curve(tokens, sequences, tokens)[0])

    def curve(self, first: int, sequences: int, last: int) -> NDArray[np.float64]:
        """Seconds of passes of `first` … `last` tokens; never falling."""
        self.linear.solve()
        base, row, sequence = self.linear.weights
        tokens = np.arange(first, last + 1)
        seconds = base + sequence * sequences + row * tokens
        correction = self._excess / (self._weight + _DOUBT)
        places = _ranges(tokens)
        known = places < len(correction)
        seconds[known] *= 1.0 + correction[places[known]]
        return np.maximum.accumulate(np.maximum(seconds, 1e-9))

    def state(self) -> dict[str, object]:
        """What `restored` needs, as JSON knows it."""
        return {
            "linear": self.linear.state(),
            "drafted": self.drafted,
            "weight": self._weight.tolist(),
            "excess": self._excess.tolist(),
        }

    @classmethod
    def restored(cls, state: dict[str, object]) -> StepTime:
        """From `state`. Raises `KeyError`, `TypeError` or `ValueError` if it is something else."""
        step_time = cls()
        step_time.linear.restore(state["linear"])  # type: ignore[arg-type]
        step_time.drafted = int(state["drafted"])  # type: ignore[call-overload]
        step_time._weight = np.array(state["weight"], dtype=float)
        step_time._excess = np.array(state["excess"], dtype=float)
        return step_time
