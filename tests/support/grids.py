"""Grids of parameters: all pairs of values by default, every combination in the tier `long`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])


def covering(axes: Sequence[Sequence[Any]], strength: int = 2) -> list[tuple[Any, ...]]:
    """Few points at which any `strength` axes take all combinations of their values (greedily)."""
    grid = list(itertools.product(*(range(len(axis)) for axis in axes)))
    wanted = {p: set(itertools.combinations(enumerate(p), strength)) for p in grid}
    missing = set().union(*wanted.values())
    chosen = []
    while missing:
        best = max(grid, key=lambda point: len(wanted[point] & missing))
        chosen.append(best)
        missing -= wanted[best]
    return [tuple(axis[at] for axis, at in zip(axes, point, strict=True)) for point in chosen]


def pairwise(**axes: Sequence[Any] | Mapping[str, Any]) -> Callable[[Test], Test]:
    """`@pairwise(rows=[1, 7, 63], params={"greedy": GREEDY, ...})`: a `parametrize` of each axis.

    Any two axes take all pairs of their values by default; the tier `long` has the whole grid.
    """
    named = [_named(name, axis) for name, axis in axes.items()]
    few = covering([range(len(axis)) for axis in named])
    cases = [
        pytest.param(
            *(value for _, (_, value) in point),
            id="-".join(name for _, (name, _) in point),
            marks=() if tuple(at for at, _ in point) in few else pytest.mark.long,
        )
        for point in itertools.product(*map(enumerate, named))
    ]
    return pytest.mark.parametrize(tuple(axes), cases)


def _named(axis: str, values: Sequence[Any] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    if isinstance(values, Mapping):
        return list(values.items())
    return [(_name(axis, value), value) for value in values]


def _name(axis: str, value: Any) -> str:
    name = str(getattr(value, "__name__", value)).removeprefix("torch.").replace(" ", "")
    return f"{axis}={name}" if isinstance(value, int | float | None) else name
