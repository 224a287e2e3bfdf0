"""Whose draft tokens a completion's verifier looked at and accepted: they add up to its totals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specbatch.schemas.records import CompletionRecord, Origin

UNTOLD = "unknown"  # of completions that do not say who drafted


@dataclass(frozen=True, slots=True)
class Drafted:
    """Draft tokens."""

    proposed: int = 0
    accepted: int = 0

    def __add__(self, other: Drafted) -> Drafted:
        return Drafted(self.proposed + other.proposed, self.accepted + other.accepted)


def by_maker(record: CompletionRecord) -> dict[str, Drafted]:
    """By proposer. The sums are `proposed` and `accepted` of the record, to the last token."""
    if not record.proposed:
        return {}
    told = record.provenance
    if not told.makers or sum(told.drafted) != record.proposed:
        return {UNTOLD: Drafted(record.proposed, record.accepted)}
    found: dict[str, Drafted] = {}
    accepted = list(_accepted(record.origins))
    accepted += [0] * (len(told.makers) - len(accepted))
    # What a stop inside of the last draft cut off was accepted all the same.
    accepted[-1] += record.accepted - sum(accepted)
    for maker, proposed, agreed in zip(told.makers, told.drafted, accepted, strict=True):
        name = told.sources[maker]
        found[name] = found.get(name, Drafted()) + Drafted(proposed, agreed)
    return found


def _accepted(origins: tuple[int, ...]) -> Iterator[int]:
    """Of each pass that had a draft: tokens of it that stand in the output."""
    agreed = 0
    for origin in origins:
        if origin == Origin.ACCEPTED:
            agreed += 1
            continue
        if origin != Origin.PLAIN:
            yield agreed
        agreed = 0
    if agreed:
        yield agreed
