"""All tokens of many completions as parallel arrays: their source, step and device time.

A completion keeps its provenance by pass (`schemas/provenance.py`). This module gives each token
its own, as the SQL view `token_record` does row by row, with a few numpy operations in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbatch.schemas.errors import StoreError
from specbatch.schemas.records import CompletionRecord, Origin

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NONE = -1  # in `source`, `drafted` and `draft_position`: there was no draft


@dataclass(frozen=True, slots=True)
class TokenTable:
    """One entry per token, in the order of the completions.

    `step` and `rejected` mean something where `traced` is true (and for `rejected`, the token is
    CORRECTED): completions of before they were kept have no provenance.
    """

    counts: Ints  # [completions] tokens of each
    completion: Ints  # [tokens] whose it is
    position: Ints  # place in the completion, from 0
    token_id: Ints
    origin: Ints
    traced: Bools
    step: Ints  # the verifier's
    # The pass's in equal parts, of which its first tokens get what is left over; a completion's
    # first one also what is in none of its passes. So they add up to the completion's.
    ticks: Ints
    source: Ints  # who drafted in its pass: a place in `sources`
    drafted: Ints  # tokens of that draft
    draft_position: Ints  # of ACCEPTED and CORRECTED tokens: place in the draft, from 0
    rejected: Ints  # the draft token in whose place a CORRECTED one stands
    sources: tuple[str, ...]

    @property
    def is_rejection(self) -> Bools:
        """Tokens that replaced a different draft token."""
        return np.asarray(self.origin == Origin.CORRECTED)


def token_table(records: Sequence[CompletionRecord]) -> TokenTable:
    """The tokens of all records; none for records whose tokens are no longer kept.

    Raises `StoreError` for a record that contradicts itself.
    """
    for record in records:
        if record.token_ids and len(record.origins) != len(record.token_ids):
            raise _contradiction(record, "there are not as many origins as tokens")
    counts = _ints(len(r.token_ids) for r in records)
    completion = np.repeat(np.arange(len(records)), counts)
    starts = np.cumsum(counts) - counts
    position = np.arange(len(completion)) - starts[completion]
    origin = _flat(r.origins if r.token_ids else () for r in records)

    # 1) Passes: each ends with the first token that is not ACCEPTED, or with its completion.
    ends = (origin != Origin.ACCEPTED) | (position == counts[completion] - 1)
    of_pass = np.cumsum(ends) - ends  # [tokens] number of the pass, over all completions
    last = np.flatnonzero(ends)  # [passes] its last token
    first = np.concatenate([[0], last[:-1] + 1]) if len(last) else last
    sizes = last - first + 1
    within = np.arange(len(completion)) - first[of_pass]
    owner = completion[first]  # [passes] whose it is

    # 2) What was kept by pass, and by pass with a draft.
    traced = np.array([bool(r.provenance.steps) for r in records], dtype=np.bool_)
    has_draft = origin[last] != Origin.PLAIN
    is_rejection = origin == Origin.CORRECTED
    kept = [r for r in records if r.token_ids and r.provenance.steps]
    _check_provenance(
        records,
        traced & (counts > 0),
        np.bincount(owner, minlength=len(records)),
        np.bincount(owner[has_draft], minlength=len(records)),
        np.bincount(completion[is_rejection], minlength=len(records)),
    )
    drafting = traced[owner] & has_draft
    steps = _spread(traced[owner], _flat(r.provenance.steps for r in kept))
    ticks = _spread(traced[owner], _flat(r.provenance.pass_ticks for r in kept), 0)
    others = _ints(r.ticks.total - sum(r.provenance.pass_ticks) for r in records)
    drafted = _spread(drafting, _flat(r.provenance.drafted for r in kept))
    proposers, sources = _proposers(kept)
    source = _spread(drafting, proposers)
    refused = is_rejection & traced[completion]

    # 3) To each token what its pass has.
    parts, left = np.divmod(ticks, sizes)
    from_draft = (origin == Origin.ACCEPTED) | is_rejection
    return TokenTable(
        counts=counts,
        completion=completion,
        position=position,
        token_id=_flat(r.token_ids for r in records),
        origin=origin,
        traced=traced[completion],
        step=steps[of_pass],
        ticks=parts[of_pass] + (within < left[of_pass]) + (position == 0) * others[completion],
        source=source[of_pass],
        drafted=drafted[of_pass],
        draft_position=np.where(from_draft, within, NONE),
        rejected=_spread(refused, _flat(r.provenance.rejected for r in kept)),
        sources=sources,
    )


def _proposers(records: Sequence[CompletionRecord]) -> tuple[Ints, tuple[str, ...]]:
    """The proposer of each pass with a draft, as an index of the names of all records."""
    names: dict[str, int] = {}
    known = [[names.setdefault(s, len(names)) for s in r.provenance.sources] for r in records]
    before = np.cumsum([0, *map(len, known)])[:-1]  # [records] where its names begin
    proposers = _flat(r.provenance.makers for r in records)
    begins = np.repeat(before, _ints(len(r.provenance.makers) for r in records))
    return _flat(known)[proposers + begins], tuple(names)


def _spread(where: Bools, values: Ints, elsewhere: int = NONE) -> Ints:
    """`values`, in order, at the places that are true."""
    spread = np.full(len(where), elsewhere, dtype=np.int64)
    spread[where] = values
    return spread


def _check_provenance(
    records: Sequence[CompletionRecord],
    traced: Bools,
    passes: Ints,  # [records]
    drafts: Ints,
    corrections: Ints,
) -> None:
    """Raise unless the values by pass are as many as the origins imply."""
    for index in np.flatnonzero(traced).tolist():
        record = records[index]
        kept = record.provenance
        for name, values, expected in (
            ("steps", kept.steps, passes[index]),
            ("shares of steps", kept.pass_ticks, passes[index]),
            ("makers", kept.makers, drafts[index]),
            ("lengths of drafts", kept.drafted, drafts[index]),
            ("rejected tokens", kept.rejected, corrections[index]),
        ):
            if len(values) != expected:
                raise _contradiction(
                    record, f"its origins imply {expected} {name}, and {len(values)} are kept"
                )
        if kept.makers and not 0 <= min(kept.makers) <= max(kept.makers) < len(kept.sources):
            raise _contradiction(record, "a draft names a source that is not listed")


def _contradiction(record: CompletionRecord, what: str) -> StoreError:
    return StoreError(
        f"completion {record.row_index}.{record.sample_index} contradicts itself: {what}"
    )


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)


def _flat(rows: Iterable[Sequence[Any]]) -> Ints:
    return _ints(chain.from_iterable(rows))
