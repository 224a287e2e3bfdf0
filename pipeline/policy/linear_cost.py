"""Seconds as a weighted sum of a few sizes, fitted while they are observed."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

_RIDGE = 1e-3  # of the mean square of a size: the pull towards the first guess
_CLIP = 4.0  # an observation above so many times the expectation counts as just that …
_READ_AT_ONCE = 16
_TRUST_AFTER = 16  # … once so many have been seen: a step in which the system slept says nothing


@dataclass(slots=True)
class LinearCost:
    """Least squares with exponential forgetting; no weight is ever negative.

    `weights` are seconds per unit of each size. They are solved for when asked, not at each
    observation.
    """

    weights: list[float]  # the first guess, then the fit
    forgetting: float = 0.99
    observations: int = 0
    _gram: NDArray[np.float64] = field(init=False)
    _moment: NDArray[np.float64] = field(init=False)
    _guess: NDArray[np.float64] = field(init=False)
    _unread: list[tuple[tuple[float, ...], float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.weights)
        self._gram, self._moment = np.zeros((count, count)), np.zeros(count)
        self._guess = np.array(self.weights)

    def observe(self, sizes: tuple[float, ...], seconds: float) -> float:
        """Note what a pass of these sizes took; returns it, clipped if it was absurd."""
        if self.observations >= _TRUST_AFTER:
            seconds = min(seconds, _CLIP * self.predict(sizes))
        self.observations += 1
        self._unread.append((sizes, max(seconds, 1e-9)))
        if self.observations <= _TRUST_AFTER or len(self._unread) >= _READ_AT_ONCE:
            self.solve()
        return seconds

    def predict(self, sizes: tuple[float, ...]) -> float:
        return float(sum(map(mul, self.weights, sizes)))

    def solve(self) -> None:
        """Bring `weights` up to what has been observed."""
        if not self._unread:
            return
        sizes = np.array([sizes for sizes, _ in self._unread], dtype=float)
        seconds = np.array([seconds for _, seconds in self._unread])
        self._unread.clear()
        # Relative errors count: a large pass must not drown the small ones.
        fade = self.forgetting ** np.arange(len(seconds), 0.0, -1.0)
        scaled = sizes * (np.sqrt(fade) / seconds)[:, None]
        kept = self.forgetting ** len(seconds)
        self._gram = kept * self._gram + scaled.T @ scaled
        self._moment = kept * self._moment + scaled.T @ np.sqrt(fade)
        active = np.diag(self._gram) > 0
        found = np.zeros(len(self.weights))
        while active.any():
            gram = self._gram[np.ix_(active, active)]
            pull = _RIDGE * np.diag(np.diag(gram))
            right = self._moment[active] + pull @ self._guess[active]
            part = np.linalg.solve(gram + pull, right)
            if (part >= 0).all():
                found[active] = part
                break
            worst = np.flatnonzero(active)[part.argmin()]
            active[worst] = False  # nothing gets cheaper by being more
        self.weights = found.tolist()

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON knows it."""
        self.solve()
        return {
            "weights": self.weights,
            "observations": self.observations,
            "gram": self._gram.tolist(),
            "moment": self._moment.tolist(),
            "guess": self._guess.tolist(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` wrote. Raises `KeyError` or `ValueError` if it is not that."""
        count = len(self.weights)
        shapes = {
            "gram": (count, count),
            "moment": (count,),
            "guess": (count,),
            "weights": (count,),
        }
        found = {name: np.array(state[name], dtype=float) for name in shapes}
        for name, shape in shapes.items():
            if found[name].shape != shape or not np.isfinite(found[name]).all():
                raise ValueError(f"a {name} like {state[name]} where {shape} numbers are wanted")
        self._gram, self._moment = found["gram"], found["moment"]
        self._guess, self.weights = found["guess"], found["weights"].tolist()
        self.observations = int(state["observations"])
