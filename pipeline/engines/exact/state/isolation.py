"""Finds the members of a batch that make its pass raise, by trying halves of it.

Knows nothing of sequences or tensors: members are anything, an attempt is any function of some of
them that leaves no trace when it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Member = TypeVar("Member")
Result = TypeVar("Result")


@dataclass(slots=True)
class Isolated(Generic[Member, Result]):
    """What came of a batch: results of the parts that passed, in order, and who raises alone."""

    passed: list[tuple[list[Member], Result]] = field(default_factory=list)
    raising: list[tuple[Member, Exception]] = field(default_factory=list)


def isolate(
    members: Sequence[Member],
    attempt: Callable[[list[Member]], Result],
    is_everyones: Callable[[Exception], bool],
) -> Isolated[Member, Result]:
    """Attempt halves, and halves of the halves that raise, down to single members.

    For a batch whose attempt raised as a whole. With k members at fault of n it takes about
    2 · k · log2(n) attempts. An exception that `is_everyones` (no member can be blamed for it) is
    raised on at once.
    """
    found: Isolated[Member, Result] = Isolated()
    halves = _halves(list(members))
    while halves:
        part = halves.pop(0)
        try:
            result = attempt(part)
        except Exception as error:
            if is_everyones(error):
                raise
            if len(part) == 1:
                found.raising.append((part[0], error))
            else:
                halves[:0] = _halves(part)
        else:
            found.passed.append((part, result))
    return found


def _halves(members: list[Member]) -> list[list[Member]]:
    middle = (len(members) + 1) // 2
    return [half for half in (members[:middle], members[middle:]) if half]
