"""What a draft model's call and a verifier's pass cost, learned while they run."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbatch.pipeline.policy import tuning

# --- a draft model: seconds as a weighted sum of a few sizes ------------------------------------


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
        if self.observations >= tuning.DRAFT_TRUST_AFTER:
            seconds = min(seconds, tuning.DRAFT_CLIP * self.predict(sizes))
        self.observations += 1
        self._unread.append((sizes, max(seconds, 1e-9)))
        if (
            self.observations <= tuning.DRAFT_TRUST_AFTER
            or len(self._unread) >= tuning.DRAFT_READ_AT_ONCE
        ):
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
        self.weights = _not_negative(self._gram, self._moment, self._guess).tolist()

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


def _not_negative(
    gram: NDArray[np.float64], moment: NDArray[np.float64], guess: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Least squares, pulled a little towards `guess`; nothing gets cheaper by being more."""
    active = np.diag(gram) > 0
    found = np.zeros(len(moment))
    while active.any():
        of_active = gram[np.ix_(active, active)]
        pull = tuning.RIDGE * np.diag(np.diag(of_active))
        right = moment[active] + pull @ guess[active]
        part = np.linalg.solve(of_active + pull, right)
        if (part >= 0).all():
            found[active] = part
            break
        active[np.flatnonzero(active)[part.argmin()]] = False
    return found


# --- the verifier: seconds by tokens and sequences ----------------------------------------------
# Machines do not work in single tokens: tiles, cache sizes and captured graphs make steps, and the
# best size is usually the right end of one. So nothing is assumed but that more tokens do not cost
# less. Passes of about the same size share a cell, which keeps its mean. Between the cells of a
# number of sequences the price is interpolated; an optimist guesses it lower. Beyond them, and
# where nothing was seen yet, a line through all cells stands in.
#
# All prices are relative to the machine's drift, which is followed apart from them: a machine that
# others use is slower now and faster then, and sizes met at different times must be comparable.


@dataclass(slots=True)
class _Cell:
    tokens: float = 0.0
    sequences: float = 0.0
    seconds: float = 0.0
    seen: int = 0
    at: int = 0  # the last one, by number

    def is_stale(self, now: int) -> bool:
        return now - self.at >= tuning.CELL_STALE

    def observe(self, tokens: int, sequences: int, seconds: float, now: int) -> None:
        if self.is_stale(now):
            self.seen = min(self.seen, 1)  # as good as learned anew
        self.at = now
        if self.seen >= tuning.CELL_SURE:
            seconds = min(seconds, tuning.PASS_CLIP * self.seconds)
        self.seen += 1
        share = 1.0 / min(self.seen, tuning.CELL_MEMORY)
        self.tokens += share * (tokens - self.tokens)
        self.sequences += share * (sequences - self.sequences)
        self.seconds += share * (seconds - self.seconds)


def _token_bucket(tokens: int) -> int:
    """The number of the cell a size falls into; its right edge is a multiple of its width."""
    if tokens <= 64:
        return tokens
    if tokens <= 128:
        return 64 + (tokens - 61) // 4
    return 80 + (tokens - 113) // 16


def _batch_bucket(sequences: int) -> int:
    """Numbers of sequences within about a tenth of each other."""
    return sequences if sequences <= 8 else 8 + round(7.5 * float(np.log(sequences / 8)))


@dataclass(slots=True)
class StepTime:
    """Fitted online; see the module. Times are seconds."""

    observations: int = 0
    drafted: int = 0  # observations that distinguish a token's price from a sequence's
    noise: float = 0.1  # mean distance of an observation from its cell's mean, relative
    drift: float = 1.0  # of the machine now, by which its prices are multiplied
    _lag: float = 1.0  # what passes took of late beside what they should
    _cells: dict[int, dict[int, _Cell]] = field(default_factory=dict)  # by batch and token bucket
    _drawn_at: int = -tuning.CURVE_FRESH  # observation, of the curves below
    _lined_at: int = -tuning.LINE_FRESH
    _weights: tuple[float, float, float] = tuning.PASS_GUESS_SEC
    _curves: dict[tuple[int, int, int, float], NDArray[np.float64]] = field(default_factory=dict)

    @property
    def _band(self) -> float:
        """How far passes may be from the drift before it has changed."""
        return min(max(tuning.LEAST_DRIFT, tuning.NOISE_DRIFT * self.noise), tuning.MOST_DRIFT)

    @property
    def has_slope(self) -> bool:
        """Whether the price of a further token has been measured."""
        return self.drafted >= tuning.SLOPE_PASSES

    def observe(self, tokens: int, sequences: int, seconds: float) -> None:
        cells = self._cells.setdefault(_batch_bucket(sequences), {})
        cell = cells.setdefault(_token_bucket(tokens), _Cell())
        seconds /= self.drift
        if cell.seen >= tuning.DRIFT_AFTER:
            self._follow(min(seconds / cell.seconds, tuning.PASS_CLIP))
        if cell.seen >= tuning.CELL_SURE:
            away = min(abs(seconds / cell.seconds - 1.0), 1.0)
            self.noise += (away - self.noise) / tuning.NOISE_MEMORY
        self.observations += 1
        known = cell.seen >= tuning.CELL_MEMORY and not cell.is_stale(self.observations)
        if known and abs(self._lag - 1.0) > 0.5 * self._band:
            # The drift is about to change: what all sizes have in common is not this one's.
            cell.at = self.observations
        else:
            cell.observe(tokens, sequences, seconds, self.observations)
        self.drafted += tokens > sequences

    def _follow(self, ratio: float) -> None:
        """A well-known size took `ratio` times its price, clipped as for its mean: else one of the
        two would drift away from the other."""
        self._lag += (ratio - self._lag) / tuning.DRIFT_MEMORY
        if abs(self._lag - 1.0) > self._band:
            self.drift *= self._lag
            self._lag = 1.0

    def knows(self, tokens: int, sequences: int) -> bool:
        """Whether passes of about this size were seen often enough."""
        cell = self._cells.get(_batch_bucket(sequences), {}).get(_token_bucket(tokens))
        if cell is None or cell.is_stale(self.observations):
            return False
        return cell.seen >= tuning.CELL_KNOWN

    def plain(self, sequences: int) -> float | None:
        """Seconds of a pass at depth 0, where such passes were measured."""
        cell = self._cells.get(_batch_bucket(sequences), {}).get(_token_bucket(sequences))
        return None if cell is None or cell.seen < tuning.CELL_SURE else cell.seconds * self.drift

    def predict(self, tokens: int, sequences: int) -> float:
        return float(self.curve(tokens, sequences, tokens)[0])

    def curve(
        self, first: int, sequences: int, last: int, optimism: float = 0.0
    ) -> NDArray[np.float64]:
        """Seconds of passes of `first` … `last` tokens; never falling.

        `optimism` puts an untried price from the middle (0) towards the lower neighbour's (1),
        and what was seldom tried as low as it may well be. The array is shared: do not write to it.
        """
        if self._is_stale(self._drawn_at, tuning.CURVE_FRESH):
            self._drawn_at = self.observations
            self._curves.clear()
            if self._is_stale(self._lined_at, tuning.LINE_FRESH):
                self._lined_at, self._weights = self.observations, self._line()
        key = (first, sequences, last, optimism)
        if key not in self._curves:
            if len(self._curves) >= tuning.CURVES_KEPT:
                self._curves.clear()
            self._curves[key] = self._draw(*key)
        return self._curves[key]

    def _is_stale(self, at: int, fresh: int) -> bool:
        """Whether much was learned since observation `at`."""
        return not 0 <= self.observations - at < min(fresh, 1 + self.observations // 8)

    def _draw(self, first: int, sequences: int, last: int, optimism: float) -> NDArray[np.float64]:
        tokens = np.arange(first, last + 1)
        base, row, sequence = self._weights
        line = np.asarray(base + sequence * sequences + row * tokens, dtype=np.float64)
        cells = self._cells.get(_batch_bucket(sequences), {})
        known = sorted(cells.values(), key=lambda c: c.tokens)
        if known:
            at = np.array([cell.tokens for cell in known])
            # A cell of few observations is taken for the line's price as far as they are missing.
            expected = base + sequence * sequences + row * at
            sure = np.minimum([cell.seen / tuning.CELL_SURE for cell in known], 1.0)
            seen = np.array([cell.seconds for cell in known])
            # Few observations may have been unlucky ones, and what is stale a bad hour's.
            stale = np.array([tuning.STALE_OPTIMISM * c.is_stale(self.observations) for c in known])
            unlucky = np.maximum(2.0 * self.noise / np.sqrt([c.seen for c in known]), stale)
            seen = seen * (1.0 - optimism * unlucky)
            # Where prices fall, whatever is fresh is right.
            weights = [
                0.1 if old else float(min(cell.seen, tuning.CELL_MEMORY))
                for cell, old in zip(known, stale > 0.0, strict=True)
            ]
            price = _never_falling(sure * seen + (1.0 - sure) * expected, weights)
            line = _between(tokens, at, price, line, expected, optimism)
        return self.drift * np.maximum.accumulate(np.maximum(line, 1e-9))

    def _line(self) -> tuple[float, float, float]:
        """Seconds of a pass, a token and a sequence, by least squares over the cells."""
        cells = [cell for bucket in self._cells.values() for cell in bucket.values()]
        if not cells:
            return tuning.PASS_GUESS_SEC
        seconds = np.array([cell.seconds for cell in cells])
        sizes = np.array([(1.0, cell.tokens, cell.sequences) for cell in cells])
        # Relative errors count: a large pass must not drown the small ones.
        target = np.sqrt([min(cell.seen, tuning.CELL_MEMORY) for cell in cells])
        scaled = sizes * (target / seconds)[:, None]
        guess = np.array(tuning.PASS_GUESS_SEC)
        base, row, sequence = _not_negative(scaled.T @ scaled, scaled.T @ target, guess).tolist()
        return base, row, sequence

    def state(self) -> dict[str, Any]:
        """What `restored` needs, as JSON knows it."""
        return {
            "observations": self.observations,
            "drafted": self.drafted,
            "noise": self.noise,
            "drift": self.drift,
            "cells": [
                [bucket, size, cell.tokens, cell.sequences, cell.seconds, cell.seen, cell.at]
                for bucket, cells in sorted(self._cells.items())
                for size, cell in sorted(cells.items())
            ],
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> StepTime:
        """From `state`. Raises `KeyError`, `TypeError` or `ValueError` if it is something else."""
        step_time = cls(drafted=int(state["drafted"]), noise=float(state["noise"]))
        if not 0.0 <= step_time.noise <= 1.0:
            raise ValueError(f"invalid noise: {step_time.noise}")
        step_time.drift = float(state.get("drift", state.get("pace", 1.0)))  # older: pace
        if not 0.0 < step_time.drift < np.inf:
            raise ValueError(f"invalid drift: {step_time.drift}")
        rows = state["cells"]
        total = sum(int(seen) for row in rows for seen in row[5:6])
        step_time.observations = total = int(state.get("observations", total))
        for row in rows:
            dated = row if len(row) > 6 else [*row, total]  # older ones do not say when
            bucket, size, tokens, sequences, seconds, seen, at = dated
            if not 0 <= at <= total:
                raise ValueError(f"invalid observation: {at} of {total}")
            cell = _Cell(float(tokens), float(sequences), float(seconds), int(seen), at=int(at))
            if not (0 < cell.seconds < np.inf and 0 < cell.tokens < np.inf and cell.seen > 0):
                raise ValueError(f"invalid cell: {cell}")
            step_time._cells.setdefault(int(bucket), {})[int(size)] = cell
        return step_time


def _never_falling(values: NDArray[np.float64], weights: list[float]) -> NDArray[np.float64]:
    """The nearest values, by weighted squares, that do not fall: pools of adjacent violators.

    Taking the highest so far instead would make every price that of the unluckiest smaller size.
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, weight in zip(values.tolist(), weights, strict=True):
        mean, total, members = value, weight, 1
        while pools and pools[-1][0] > mean:
            other, more, count = pools.pop()
            mean = (mean * total + other * more) / (total + more)
            total, members = total + more, members + count
        pools.append((mean, total, members))
    return np.repeat([mean for mean, _, _ in pools], [members for _, _, members in pools])


def _between(
    tokens: NDArray[np.int64],
    at: NDArray[np.float64],  # sizes that are known, ascending
    price: NDArray[np.float64],  # of these
    line: NDArray[np.float64],  # for every size of `tokens`
    expected: NDArray[np.float64],  # the line at the known sizes
    optimism: float,
) -> NDArray[np.float64]:
    """Known prices, what lies between them, and the line shifted to fit beyond them."""
    middle = np.interp(tokens, at, price)
    right = np.searchsorted(at, tokens)
    lower = price[np.maximum(right - 1, 0)]
    found = middle
    if optimism:
        tried = {_token_bucket(round(size)) for size in at.tolist()}
        untried = np.array([_token_bucket(size) not in tried for size in tokens.tolist()])
        found = middle - optimism * np.maximum(middle - lower, 0.0) * untried
    beyond = tokens > at[-1]
    rise = np.maximum(line[beyond] / expected[-1] - 1.0, 0.0)
    found[beyond] = price[-1] * (1.0 + rise * (1.0 - tuning.BEYOND_OPTIMISM * optimism))
    before = tokens < at[0]
    found[before] = price[0] * line[before] / expected[0]
    return found
