"""Converts rows of `completions` to records and back.

A column is NULL if other columns imply its value. Nothing is lost: a value that differs from what
the others imply is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from specbatch.schemas.job_figures import RowFigures
from specbatch.schemas.mapper import PASSES, as_float32
from specbatch.schemas.provenance import (
    TICK_KINDS,
    TICKS_PER_SEC,
    Provenance,
    Ticks,
    by_depth,
)
from specbatch.schemas.records import CompletionRecord, FinishReason, Lease, TopLogprobs

# A record's `provenance` and `ticks`, as columns.
_TICKS = {kind: f"{kind}_ticks" for kind in TICK_KINDS}
PROVENANCE = (*PASSES, *_TICKS.values())


# Columns that are fields of a record, unchanged.
_COUNTS = (
    *("row_index", "sample_index", "tag", "prompt_tokens", "proposed", "accepted"),
    *("verifier_passes", "cost_usd"),
)
_FIELDS = (
    *_COUNTS,
    *("row_id", "seed", "token_ids", "text", "error", "decode_sec", "baseline_sec"),
    *("price_microusd", "ahead_ticks", "ahead_price_microusd"),
    *("numeric_class", "model_fingerprint", "receipt", "reused_from", "score"),
)


def completion_values(lease: Lease, record: CompletionRecord) -> dict[str, Any]:
    """Column values of one completion of the leased group, in single precision."""
    flat = provenance_values(record)
    return {
        "job_id": lease.job_id,
        "group_index": lease.group_index,
        **{name: getattr(record, name) for name in (*_FIELDS, "origins", "verifier", "proposer")},
        "finish_reason": record.finish_reason.value,
        "logprobs": as_float32(record.logprobs),
        **_flat(record.top_logprobs),
        **{name: None if value == () else value for name, value in flat.items()},
        **_if_not_derived(record),
    }


def beside_job(row: Mapping[str, Any], of_job: Mapping[str, Any]) -> dict[str, Any]:
    """A completion's values as the store has them: NULL where its job's row has the same."""
    named = {**row, "month": of_job["month"]}
    for name in ("verifier", "proposer"):
        same = row[name] == of_job[f"job_{name}"]
        named[name] = None if same else row[name] or ""
    return named


def _if_not_derived(record: CompletionRecord) -> dict[str, Any]:
    """Columns that others nearly always imply; NULL where they do."""
    proposed, accepted = by_depth(record.origins, record.provenance.drafted)
    makers = record.provenance.makers
    derived = {
        "proposed_at_depth": proposed,
        "accepted_at_depth": accepted,
        "makers": (0,) * len(record.provenance.drafted),
        "compute_sec": record.ticks.total / TICKS_PER_SEC,
        "draft_sec": record.ahead_ticks / TICKS_PER_SEC,
    }
    own = {name: makers if name == "makers" else getattr(record, name) for name in derived}
    return {name: None if own[name] == value else own[name] for name, value in derived.items()}


def completion_record(row: Any) -> CompletionRecord:
    """The record of a row joined with its job's, whose models stand for missing ones."""
    fields = provenance_fields(row._mapping)
    provenance, ticks = fields["provenance"], fields["ticks"]
    if row.makers is None:
        provenance = replace(provenance, makers=(0,) * len(provenance.drafted))
    proposed, accepted = row.proposed_at_depth, row.accepted_at_depth
    if proposed is None or accepted is None:
        derived = by_depth(row.origins or (), provenance.drafted)
        proposed, accepted = (
            derived[i] if own is None else own for i, own in enumerate((proposed, accepted))
        )
    return CompletionRecord(
        **{name: getattr(row, name) for name in _FIELDS},
        finish_reason=FinishReason(row.finish_reason),
        origins=row.origins or (),
        logprobs=as_float32(row.logprobs or ()),
        verifier=row.job_verifier if row.verifier is None else row.verifier,
        proposer=row.job_proposer if row.proposer is None else row.proposer or None,
        proposed_at_depth=proposed,
        accepted_at_depth=accepted,
        compute_sec=_sec(row.compute_sec, ticks.total),
        draft_sec=_sec(row.draft_sec, row.ahead_ticks),
        top_logprobs=_per_token(row),
        provenance=provenance,
        ticks=ticks,
    )


def row_figures(row: Any) -> RowFigures:
    """A completion's counters, from the columns without text."""
    drafted = tuple(row.drafted or ())
    return RowFigures(
        **{name: getattr(row, name) for name in _COUNTS},
        group_index=row.group_index,
        finish_reason=FinishReason(row.finish_reason),
        ticks=sum(getattr(row, column) for column in _TICKS.values()),
        origins=tuple(row.origins or ()),
        steps=tuple(row.steps or ()),
        sources=tuple(row.sources or ()),
        makers=(0,) * len(drafted) if row.makers is None else tuple(row.makers),
        drafted=drafted,
    )


def _sec(own: float | None, ticks: int) -> float:
    return ticks / TICKS_PER_SEC if own is None else own


def provenance_values(record: CompletionRecord) -> dict[str, Any]:
    """Values by column; `PROVENANCE` names the columns."""
    found, ticks = record.provenance, record.ticks
    return {name: getattr(found, name) for name in PASSES} | {
        column: getattr(ticks, kind) for kind, column in _TICKS.items()
    }


def provenance_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `provenance_values`: two fields of a record."""
    passes = (tuple(row[name] or ()) for name in PASSES)
    return {
        "provenance": Provenance(*passes),
        "ticks": Ticks(*(row[column] for column in _TICKS.values())),
    }


def provenance_columns(columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """The same of many rows: the two fields of each."""
    passes = ([tuple(value or ()) for value in columns[name]] for name in PASSES)
    return {
        "provenance": list(map(Provenance, *passes)),
        "ticks": list(map(Ticks, *(columns[column] for column in _TICKS.values()))),
    }


def _flat(tops: tuple[TopLogprobs, ...] | None) -> dict[str, Any]:
    if tops is None:
        return {"top_token_ids": None, "top_logprobs": None}
    return {
        "top_token_ids": tuple(chain.from_iterable(ids for ids, _ in tops)),
        "top_logprobs": as_float32(chain.from_iterable(values for _, values in tops)),
    }


def _per_token(row: Any) -> tuple[TopLogprobs, ...] | None:
    """The inverse of `_flat`; every token has the same number of entries."""
    if row.top_token_ids is None:
        return None
    ids, values, tokens = tuple(row.top_token_ids), as_float32(row.top_logprobs), row.token_ids
    n = len(ids) // max(len(tokens), 1)
    return tuple((ids[i * n : i * n + n], values[i * n : i * n + n]) for i in range(len(tokens)))
