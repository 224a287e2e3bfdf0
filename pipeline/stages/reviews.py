"""Completions that policies held back, as they are published by what a person has decided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from specbatch.schemas.policies import Decided, HeldBack, Place, Reviews
from specbatch.schemas.records import CompletionRecord, FinishReason

BY_A_REVIEWER = "blocked by a reviewer"
LOST = "released by a reviewer, but its text is in no file of the workspace any more"

# May lack some, whose files are gone.
Whole = Callable[[Mapping[Place, HeldBack]], Mapping[Place, CompletionRecord]]


def with_decisions(
    rows: Iterable[CompletionRecord], reviews: Reviews, whole: Whole
) -> Iterator[CompletionRecord]:
    """The completions as they are published. `whole` reads those that were released."""
    released = [place for place, said in reviews.decided.items() if said is Decided.RELEASED]
    texts = whole({place: reviews.held[place] for place in released}) if released else {}
    for row in rows:
        place = (row.row_index, row.sample_index)
        decided = reviews.decided.get(place)
        if decided is Decided.RELEASED:
            yield texts.get(place) or replace(row, error=LOST)
        elif decided is Decided.BLOCKED:
            yield replace(row, finish_reason=FinishReason.BLOCKED, error=BY_A_REVIEWER)
        else:
            yield row


def revision_of(reviews: Reviews) -> dict[str, Any]:
    """What the manifest says of reviews; nothing where nothing was held back."""
    if not reviews.held:
        return {}
    return {"revision": 1 + reviews.times, "in_review": len(reviews.pending)}
