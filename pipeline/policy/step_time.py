"""What a verifier pass costs, by its tokens and sequences: learned while it runs.

All prices are of a common pace, which is followed apart from them: a machine that others use is
slower now and faster then, and a size met in one hour must be compared with one met in another.

Machines do not work in single tokens: tiles, cache sizes and captured graphs make steps, and the
best place is usually the right end of one. So nothing is assumed but that more tokens do not cost
less. Passes of about the same size share a cell, which remembers its mean. Between the cells of a
number of sequences the price is interpolated, or guessed lower by one who wants to try; beyond
them, and where nothing was seen yet, a line through all cells tells.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MEMORY = 512  # observations a cell's mean reaches back
_PACE_MEMORY = 32  # … and of how far passes lag behind the pace: that may change within a second
_LEAST_LAG = 0.03  # from which on the pace is another: beyond what noise alone …
_NOISE_LAG = 0.5  # … makes of that memory, which is so many times as much, …
_MOST_LAG = 0.075  # … but no more than this: another pace looks like noise at first
_PACED = 64  # observations of a cell, before the pace is read off it
_NOISE_MEMORY = 128
_SURE = 3  # observations after which a cell's mean stands for itself
_NEAR = 3  # numbers of sequences, up and down, whose sizes tell of each other
_KNOWN = 48  # observations after which a cell needs no more trying …
_STALE = 8000  # … until so many passes of other sizes have gone by: it may have been a bad hour
_CLIP = 1.12  # above so many times the mean a pass counts as that: somebody else was at work
_DRAFTED_ENOUGH = 3  # passes with more tokens than sequences, before a token's price is known
_GUESS = (2e-3, 5e-5, 1e-6)  # seconds: of a pass, a token, a sequence
_RIDGE = 1e-3
_FRESH = 16  # observations for which a curve that was drawn still holds
_LINE_FRESH = 128
_CURVES_KEPT = 64
_HOPE_STALE = 0.25  # of a stale price, that an optimist hopes is not there any more
_HOPE_BEYOND = 0.5  # of a line's rise beyond all sizes seen, that an optimist hopes is not there


@dataclass(slots=True)
class _Cell:
    tokens: float = 0.0
    sequences: float = 0.0
    seconds: float = 0.0
    seen: int = 0
    at: int = 0  # the last one, by number

    def is_stale(self, now: int) -> bool:
        return now - self.at >= _STALE

    def observe(self, tokens: int, sequences: int, seconds: float, now: int) -> None:
        if self.is_stale(now):
            self.seen = min(self.seen, 1)  # as good as learned anew
        self.at = now
        if self.seen >= _SURE:
            seconds = min(seconds, _CLIP * self.seconds)
        self.seen += 1
        share = 1.0 / min(self.seen, _MEMORY)
        self.tokens += share * (tokens - self.tokens)
        self.sequences += share * (sequences - self.sequences)
        self.seconds += share * (seconds - self.seconds)


def _place(tokens: int) -> int:
    """The number of the cell a size falls into; its right edge is a multiple of its width."""
    if tokens <= 64:
        return tokens
    if tokens <= 128:
        return 64 + (tokens - 61) // 4
    return 80 + (tokens - 113) // 16


def _places(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """`_place` of each; passes have no largest size."""
    middle, large = 64 + (tokens - 61) // 4, 80 + (tokens - 113) // 16
    return np.where(tokens <= 64, tokens, np.where(tokens <= 128, middle, large))


def _crowd(sequences: int) -> int:
    """Numbers of sequences within about a tenth of each other."""
    return sequences if sequences <= 8 else 8 + round(7.5 * float(np.log(sequences / 8)))


@dataclass(slots=True)
class StepTime:
    """Fitted online; see the module. Times are seconds."""

    observations: int = 0
    drafted: int = 0  # observations that tell a token's price from a sequence's
    noise: float = 0.1  # mean distance of an observation from its cell's mean, relative
    pace: float = 1.0  # of the machine now, by which its prices are multiplied
    _lag: float = 1.0  # what passes took of late beside what they should
    _cells: dict[int, dict[int, _Cell]] = field(default_factory=dict)  # by crowd, by place
    _drawn_at: int = -_FRESH  # observation, of the curves below
    _lined_at: int = -_LINE_FRESH
    _weights: tuple[float, float, float] = _GUESS
    _curves: dict[tuple[int, int, int, float], NDArray[np.float64]] = field(default_factory=dict)
    _lent: dict[int, list[_Cell]] = field(default_factory=dict)  # by sequences; as fresh as those

    @property
    def _band(self) -> float:
        """How far passes may lag behind the pace before it is another."""
        return min(max(_LEAST_LAG, _NOISE_LAG * self.noise), _MOST_LAG)

    @property
    def has_slope(self) -> bool:
        """Whether the price of a further token has been measured."""
        return self.drafted >= _DRAFTED_ENOUGH

    def observe(self, tokens: int, sequences: int, seconds: float) -> None:
        cells = self._cells.setdefault(_crowd(sequences), {})
        cell = cells.setdefault(_place(tokens), _Cell())
        seconds /= self.pace
        if cell.seen >= _PACED:
            self._follow(min(seconds / cell.seconds, _CLIP))
        if cell.seen >= _SURE:
            away = min(abs(seconds / cell.seconds - 1.0), 1.0)
            self.noise += (away - self.noise) / _NOISE_MEMORY
        self.observations += 1
        known = cell.seen >= _MEMORY and not cell.is_stale(self.observations)
        if known and abs(self._lag - 1.0) > 0.5 * self._band:
            # The pace is about to be another: what all sizes have in common is not this one's.
            cell.at = self.observations
        else:
            cell.observe(tokens, sequences, seconds, self.observations)
        self.drafted += tokens > sequences

    def _follow(self, ratio: float) -> None:
        """A well-known size took `ratio` times its price, clipped as for its mean: else one of the
        two would drift away from the other."""
        self._lag += (ratio - self._lag) / _PACE_MEMORY
        if abs(self._lag - 1.0) > self._band:
            self.pace *= self._lag
            self._lag = 1.0

    def knows(self, tokens: int, sequences: int) -> bool:
        """Whether passes of about this size were seen often enough."""
        cell = self._cells.get(_crowd(sequences), {}).get(_place(tokens))
        if cell is None or cell.is_stale(self.observations):
            return False
        return cell.seen >= _KNOWN

    def plain(self, sequences: int) -> float | None:
        """Seconds of a pass at depth 0, where such passes were measured."""
        cell = self._cells.get(_crowd(sequences), {}).get(_place(sequences))
        return None if cell is None or cell.seen < _SURE else cell.seconds * self.pace

    def predict(self, tokens: int, sequences: int) -> float:
        return float(self.curve(tokens, sequences, tokens)[0])

    def curve(
        self, first: int, sequences: int, last: int, optimism: float = 0.0
    ) -> NDArray[np.float64]:
        """Seconds of passes of `first` … `last` tokens; never falling.

        `optimism` puts an untried price from the middle (0) towards the lower neighbour's (1),
        and what was seldom tried as low as it may well be. The array is shared: do not write to it.
        """
        if self._is_stale(self._drawn_at, _FRESH):
            self._drawn_at = self.observations
            self._curves.clear()
            self._lent.clear()
            if self._is_stale(self._lined_at, _LINE_FRESH):
                self._lined_at, self._weights = self.observations, self._line()
        key = (first, sequences, last, optimism)
        if key not in self._curves:
            if len(self._curves) >= _CURVES_KEPT:
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
        if sequences not in self._lent:
            self._lent[sequences] = self._borrowed(sequences)
        cells = [*self._cells.get(_crowd(sequences), {}).values(), *self._lent[sequences]]
        known = sorted(cells, key=lambda c: c.tokens)
        if known:
            at = np.array([cell.tokens for cell in known])
            # A cell of few observations is taken for the line's price as far as they are missing.
            expected = base + sequence * sequences + row * at
            sure = np.minimum([cell.seen / _SURE for cell in known], 1.0)
            seen = np.array([cell.seconds for cell in known])
            # Few observations may have been unlucky ones, and what is stale a bad hour's.
            stale = np.array([_HOPE_STALE * c.is_stale(self.observations) for c in known])
            unlucky = np.maximum(2.0 * self.noise / np.sqrt([c.seen for c in known]), stale)
            seen = seen * (1.0 - optimism * unlucky)
            # Where prices fall, whatever is fresh is right.
            weights = [
                0.1 if old else float(min(cell.seen, _MEMORY))
                for cell, old in zip(known, stale > 0.0, strict=True)
            ]
            price = _never_falling(sure * seen + (1.0 - sure) * expected, weights)
            line = _between(tokens, at, price, line, expected, optimism)
        return self.pace * np.maximum.accumulate(np.maximum(line, 1e-9))

    def _borrowed(self, sequences: int) -> list[_Cell]:
        """Sizes that were met with nearly as many sequences, and never with so many: tokens are
        what a pass costs most, whosever they are. Each counts as few observations."""
        base, row, sequence = self._weights
        crowd = _crowd(sequences)
        met = {place for place, cell in self._cells.get(crowd, {}).items() if cell.seen >= _SURE}
        found: dict[int, _Cell] = {}
        for near in (crowd + away * side for away in range(1, _NEAR + 1) for side in (1, -1)):
            for place, cell in self._cells.get(near, {}).items():
                if place in met or place in found or cell.seen < _SURE or cell.tokens < sequences:
                    continue
                rest = base + row * cell.tokens
                scale = (rest + sequence * sequences) / (rest + sequence * cell.sequences)
                found[place] = _Cell(
                    cell.tokens, sequences, scale * cell.seconds, _SURE, self.observations
                )
        return list(found.values())

    def _line(self) -> tuple[float, float, float]:
        """Seconds of a pass, a token and a sequence, by least squares over the cells."""
        cells = [cell for crowd in self._cells.values() for cell in crowd.values()]
        if not cells:
            return _GUESS
        seconds = np.array([cell.seconds for cell in cells])
        sizes = np.array([(1.0, cell.tokens, cell.sequences) for cell in cells])
        # Relative errors count: a large pass must not drown the small ones.
        scaled = sizes * (np.sqrt([min(cell.seen, _MEMORY) for cell in cells]) / seconds)[:, None]
        wanted = np.sqrt([min(cell.seen, _MEMORY) for cell in cells])
        gram, moment = scaled.T @ scaled, scaled.T @ wanted
        pull = _RIDGE * np.diag(gram)
        active = np.ones(3, dtype=bool)
        while True:
            part = np.linalg.solve(
                gram[np.ix_(active, active)] + np.diag(pull[active]),
                moment[active] + pull[active] * np.array(_GUESS)[active],
            )
            if (part >= 0).all() or active.sum() == 1:
                break
            active[np.flatnonzero(active)[part.argmin()]] = False  # more is never cheaper
        weights = np.zeros(3)
        weights[active] = np.maximum(part, 0.0)
        return float(weights[0]), float(weights[1]), float(weights[2])

    def state(self) -> dict[str, Any]:
        """What `restored` needs, as JSON knows it."""
        return {
            "observations": self.observations,
            "drafted": self.drafted,
            "noise": self.noise,
            "pace": self.pace,
            "cells": [
                [crowd, place, cell.tokens, cell.sequences, cell.seconds, cell.seen, cell.at]
                for crowd, cells in sorted(self._cells.items())
                for place, cell in sorted(cells.items())
            ],
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> StepTime:
        """From `state`. Raises `KeyError`, `TypeError` or `ValueError` if it is something else."""
        step_time = cls(drafted=int(state["drafted"]), noise=float(state["noise"]))
        if not 0.0 <= step_time.noise <= 1.0:
            raise ValueError(f"no noise is {step_time.noise}")
        step_time.pace = float(state.get("pace", 1.0))  # older ones have none
        if not 0.0 < step_time.pace < np.inf:
            raise ValueError(f"no machine has a pace of {step_time.pace}")
        rows = state["cells"]
        total = sum(int(seen) for row in rows for seen in row[5:6])
        step_time.observations = total = int(state.get("observations", total))
        for row in rows:
            dated = row if len(row) > 6 else [*row, total]  # older ones do not say when
            crowd, place, tokens, sequences, seconds, seen, at = dated
            if not 0 <= at <= total:
                raise ValueError(f"no size was met last at {at} of {total} observations")
            cell = _Cell(float(tokens), float(sequences), float(seconds), int(seen), at=int(at))
            if not (0 < cell.seconds < np.inf and 0 < cell.tokens < np.inf and cell.seen > 0):
                raise ValueError(f"no pass is like {cell}")
            step_time._cells.setdefault(int(crowd), {})[int(place)] = cell
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
        untried = ~np.isin(_places(tokens), _places(np.round(at).astype(np.int64)))
        found = middle - optimism * np.maximum(middle - lower, 0.0) * untried
    beyond = tokens > at[-1]
    rise = np.maximum(line[beyond] / expected[-1] - 1.0, 0.0)
    found[beyond] = price[-1] * (1.0 + rise * (1.0 - _HOPE_BEYOND * optimism))
    before = tokens < at[0]
    found[before] = price[0] * line[before] / expected[0]
    return found
