"""Where a completion's tokens came from, and what device time they took. Whole numbers throughout,
so that shares add up to what was shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

_PLAIN, _ACCEPTED = 0, 1  # of `records.Origin`, which imports this file
TICKS_PER_SEC = 10_000_000  # 100 ns each: a share of up to 214 s fits four bytes


def in_seconds(ticks: int, digits: int = 2) -> str:
    """`1,234.50 s`."""
    return f"{ticks / TICKS_PER_SEC:,.{digits}f} s"


class TimeKind(StrEnum):
    """What a device's time went into. Each tick of a worker is of exactly one kind."""

    PREFILL = "prefill"  # reading prompts
    VERIFY = "verify"  # rows that decided a token which was kept
    DRAFT = "draft"  # in proposers' models
    REJECTED = "rejected"  # rows of draft tokens that the verifier refused
    PADDING = "padding"  # rows that fill a tile or a recorded pass
    OVERHEAD = "overhead"  # of a step outside the models; of a worker while it holds work
    LOST = "lost"  # attempts that came to nothing: retries, crashes, fenced commits
    IDLE = "idle"  # the worker had nothing to do


@dataclass(frozen=True, slots=True)
class Ticks:
    """A completion's share of device time by kind, in ticks."""

    prefill: int = 0
    verify: int = 0
    draft: int = 0
    rejected: int = 0
    padding: int = 0
    overhead: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: Ticks) -> Ticks:
        names = [field.name for field in fields(self)]
        return Ticks(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, slots=True)
class Provenance:
    """Beside a completion's `origins`: what each of its passes and drafts was.

    A pass ends with the first token that is not ACCEPTED, or with the completion. So the number of
    a token's pass, and its place in the draft, follow from `origins` alone.
    """

    steps: tuple[int, ...] = ()  # [passes] number of the verifier's step, in its process
    pass_ticks: tuple[int, ...] = ()  # [passes] the completion's share of that step
    sources: tuple[str, ...] = ()  # names of the proposers that drafted for it
    makers: tuple[int, ...] = ()  # [passes with a draft] whose it was: index in `sources`
    drafted: tuple[int, ...] = ()  # [passes with a draft] its tokens
    rejected: tuple[int, ...] = ()  # [CORRECTED tokens] the draft token in whose place each stands


TICK_KINDS = tuple(field.name for field in fields(Ticks))
NO_TICKS = Ticks()
NO_PROVENANCE = Provenance()


def by_depth(
    origins: Sequence[int], drafted: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draft tokens looked at, and accepted, by draft position, as `Provenance` alone tells it.

    What a stop inside of a draft cut off does not count as accepted here.
    """
    if not drafted:
        return (), ()
    deepest = max(drafted)
    proposed, accepted = [0] * (deepest + 1), [0] * (deepest + 1)  # by passes that went so far
    for tokens in drafted:
        proposed[tokens] += 1
    begin = 0
    for end, origin in enumerate(origins):
        if origin != _ACCEPTED:
            if origin != _PLAIN:
                accepted[min(end - begin, deepest)] += 1
            begin = end + 1
    if begin < len(origins):
        accepted[min(len(origins) - begin, deepest)] += 1
    for depth in range(deepest - 1, 0, -1):  # who went further came through here
        proposed[depth] += proposed[depth + 1]
        accepted[depth] += accepted[depth + 1]
    return tuple(proposed[1:]), tuple(accepted[1:])
