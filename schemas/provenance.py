"""Where a completion's tokens came from, and the device time they took.

All values are whole numbers, so that shares add up exactly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

_PLAIN, _ACCEPTED = b"\x00", b"\x01"  # of `records.Origin`, which imports this file
_ENDS = re.compile(b"[^" + _ACCEPTED + b"]")
TICKS_PER_SEC = 10_000_000  # 100 ns each: a share of up to 214 s fits four bytes


def in_seconds(ticks: int, digits: int = 2) -> str:
    """`1,234.50 s`."""
    return f"{ticks / TICKS_PER_SEC:,.{digits}f} s"


class TimeKind(StrEnum):
    """What device time was spent on. Each 100-ns unit of a worker has exactly one kind."""

    PREFILL = "prefill"  # reading prompts
    VERIFY = "verify"  # rows that decided a token which was kept
    DRAFT = "draft"  # in proposers' models
    REJECTED = "rejected"  # rows of draft tokens that the verifier refused
    PADDING = "padding"  # rows that fill a tile or a recorded pass
    OVERHEAD = "overhead"  # of a step outside the models; of a worker while it holds work
    LOST = "lost"  # attempts without a result: retries, crashes, fenced commits
    IDLE = "idle"  # the worker had nothing to do


@dataclass(frozen=True, slots=True)
class Ticks:
    """A completion's share of device time by kind, in units of 100 ns."""

    prefill: int = 0
    verify: int = 0
    draft: int = 0
    rejected: int = 0
    padding: int = 0
    overhead: int = 0

    @property
    def in_order(self) -> tuple[int, ...]:
        """By kind. Written out: `fields` takes ten times as long, and every record asks twice."""
        return (
            *(self.prefill, self.verify, self.draft),
            *(self.rejected, self.padding, self.overhead),
        )

    @property
    def total(self) -> int:
        return sum(self.in_order)

    def __add__(self, other: Ticks) -> Ticks:
        names = [field.name for field in fields(self)]
        return Ticks(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, slots=True)
class Provenance:
    """Describes each pass and draft of a completion, beside its `origins`.

    A pass ends with the first token that is not ACCEPTED, or with the completion. So `origins`
    alone gives the pass of a token and its place in the draft.
    """

    steps: tuple[int, ...] = ()  # [passes] number of the verifier's pass, in its process
    pass_ticks: tuple[int, ...] = ()  # [passes] its share of that pass; of one call, equal
    sources: tuple[str, ...] = ()  # names of the proposers that drafted for it
    makers: tuple[int, ...] = ()  # [passes with a draft] whose it was: index in `sources`
    drafted: tuple[int, ...] = ()  # [passes with a draft] its tokens
    rejected: tuple[int, ...] = ()  # [CORRECTED tokens] the draft token in whose place each stands


TICK_KINDS = tuple(field.name for field in fields(Ticks))
NO_TICKS = Ticks()
NO_PROVENANCE = Provenance()


def passes_of(origins: Sequence[int]) -> tuple[list[int], int]:
    """How many draft tokens each pass with a draft accepted, and the number of passes without.

    A pass ends with the first token that is not accepted, or with the text, inside of a draft.
    """
    text = bytes(origins)
    runs = list(map(len, _ENDS.split(text)))
    ends = text.translate(None, _ACCEPTED)
    kept = [run for run, end in zip(runs, ends, strict=False) if end]
    if runs[-1]:
        kept.append(runs[-1])
    return kept, ends.count(_PLAIN)


def pass_depths(origins: Sequence[int], drafted: Sequence[int]) -> dict[int, int]:
    """Draft tokens of each pass with a draft, by the tokens of output before it."""
    found, begin, left = {}, 0, iter(drafted)
    for place, origin in enumerate(bytes(origins)):
        is_last = place == len(origins) - 1
        if origin != _ACCEPTED[0] or is_last:
            if origin != _PLAIN[0]:
                found[begin] = next(left)
            begin = place + 1
    return found


def by_depth(
    origins: Sequence[int], drafted: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Verified and accepted draft tokens by draft position, from `Provenance` alone.

    Draft tokens behind a stop inside a draft do not count as accepted.
    """
    if not drafted:
        return (), ()
    deepest = max(drafted)
    proposed, accepted = [0] * (deepest + 1), [0] * (deepest + 1)  # by passes that went so far
    for tokens in drafted:
        proposed[tokens] += 1
    for tokens in passes_of(origins)[0]:
        accepted[min(tokens, deepest)] += 1
    for depth in range(deepest - 1, 0, -1):  # deeper drafts passed this depth too
        proposed[depth] += proposed[depth + 1]
        accepted[depth] += accepted[depth + 1]
    return tuple(proposed[1:]), tuple(accepted[1:])
