"""Makes the record batches of each exported set (`schemas/export_arrow.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import numpy as np
import pyarrow as pa

from specbatch.pipeline.outputs.parts import top_columns
from specbatch.pipeline.outputs.token_table import NONE, Bools, token_table
from specbatch.schemas import export_arrow
from specbatch.schemas.provenance import TICK_KINDS, Provenance
from specbatch.schemas.records import CompletionRecord, FinishReason, Origin
from specbatch.schemas.timekeeping import TimeSlice, usd_of

# Numbered from 0; the last is no `Origin`: of all tokens of a completion that is a copy.
_ORIGINS = pa.array([*(origin.name.lower() for origin in Origin), "reused"])

MASKED = -1  # the id of a token that privacy has removed

Records = Sequence[CompletionRecord]


def completion_batch(job_id: str, records: Records) -> pa.RecordBatch:
    """One row per completion, with everything that is kept."""
    special: dict[str, Callable[[CompletionRecord], Any]] = {
        "text": _text,
        "token_ids": lambda r: _kept(r, r.token_ids),
        "origins": lambda r: list(map(int, r.origins)),
        "logprobs": lambda r: _kept(r, r.logprobs),
        "top_logprobs": top_columns,
        "rejected": lambda r: _kept(r, r.provenance.rejected) if r.provenance.steps else None,
    }
    return _batch(export_arrow.COMPLETIONS, job_id, records, special)


def token_batch(job_id: str, records: Records) -> pa.RecordBatch:
    """One row per token, in order."""
    table = token_table(records)
    prices = np.array([r.price_microusd for r in records], dtype=np.int64)
    rows = np.array([r.row_index for r in records], dtype=np.int64)
    samples = np.array([r.sample_index for r in records], dtype=np.int64)
    names = pa.array(table.sources, pa.string())
    # A completion without kept log-probabilities has none here.
    has_logprobs = np.array([len(r.logprobs) == len(r.token_ids) for r in records], dtype=np.bool_)
    logprobs = np.full(len(table.position), np.nan)
    logprobs[has_logprobs[table.completion]] = np.fromiter(
        (p for r in compress(records, has_logprobs) for p in r.logprobs), dtype=np.float64
    )
    copied = np.array([r.reused_from is not None for r in records], dtype=np.bool_)
    origins = np.where(copied[table.completion], len(Origin), table.origin)
    columns = {
        "job_id": pa.repeat(job_id, len(table.position)),
        "row_index": rows[table.completion],
        "sample_index": samples[table.completion],
        "position": table.position,
        "token_id": table.token_id,
        "origin": _ORIGINS.take(pa.array(origins)),
        "proposer": names.take(_nullable(table.source, table.source == NONE, pa.int64())),
        "verifier_step": _nullable(table.step, ~table.traced, pa.int64()),
        "logprob": _nullable(logprobs, ~has_logprobs[table.completion], pa.float32()),
        "draft_position": _nullable(table.draft_position, table.draft_position == NONE, pa.int32()),
        "rejected_token": _nullable(
            table.rejected, ~(table.is_rejection & table.traced), pa.int32()
        ),
        "ticks": table.ticks,
        "price_microusd": prices[table.completion],
    }
    return _of_columns(export_arrow.TOKENS, columns)


def cost_batch(job_id: str, records: Records) -> pa.RecordBatch:
    """One row per completion, with device time and money."""
    return _batch(
        export_arrow.COSTS,
        job_id,
        records,
        {
            "ticks": lambda r: r.ticks.total,
            "cost_units": cost_units,
            "cost_usd": cost_usd,
        },
    )


def cost_units(record: CompletionRecord) -> int | None:
    """100-ns units × price, exactly; None for a completion from before these were kept."""
    if record.compute_sec and not record.ticks.total and not record.ahead_ticks:
        return None
    ahead = record.ahead_ticks * record.ahead_price_microusd
    return record.ticks.total * record.price_microusd + ahead


def cost_usd(record: CompletionRecord) -> float:
    """The same in dollars; for older completions the store's figure."""
    units = cost_units(record)
    return record.cost_usd if units is None else usd_of(units)


def time_batch(job_id: str, slices: Sequence[TimeSlice]) -> pa.RecordBatch:
    """One row per attempt and session, with device time."""
    columns: dict[str, Any] = {
        "job_id": pa.repeat(job_id, len(slices)),
        "session_id": [s.session_id for s in slices],
        "group_index": [s.attempt.group_index for s in slices],
        "generation": [s.attempt.generation for s in slices],
        "stage": [s.attempt.stage.value for s in slices],
        "kept": [s.kept for s in slices],
        "in_flight": [s.in_flight for s in slices],
        "device": [s.device.kind for s in slices],
        "region": [s.device.region for s in slices],
        "tenure": [s.device.tenure for s in slices],
        **{f"{kind}_ticks": [getattr(s.ticks, kind) for s in slices] for kind in TICK_KINDS},
        "ticks": [s.ticks.total for s in slices],
        "price_microusd": [s.device.price_microusd for s in slices],
        "cost_units": [s.ticks.total * s.device.price_microusd for s in slices],
        "cost_usd": [usd_of(s.ticks.total * s.device.price_microusd) for s in slices],
    }
    return _of_columns(export_arrow.TIME, columns)


def _batch(
    schema: pa.Schema,
    job_id: str,
    records: Records,
    special: dict[str, Callable[[CompletionRecord], Any]],
) -> pa.RecordBatch:
    """Columns by name, from `special`, the record's provenance, its ticks or the record itself."""
    columns: dict[str, Any] = {"job_id": pa.repeat(job_id, len(records))}
    for name in schema.names[1:]:
        kind = name.removesuffix("_ticks")
        if name in special:
            columns[name] = [special[name](r) for r in records]
        elif name in Provenance.__slots__:  # null for completions from before it was kept
            found = [r.provenance for r in records]
            columns[name] = [getattr(p, name) if p.steps else None for p in found]
        elif name != kind and kind in TICK_KINDS:
            columns[name] = [getattr(r.ticks, kind) for r in records]
        elif name == "completion_tokens":
            columns[name] = [len(r.origins) for r in records]  # also of tokens no longer kept
        elif name == "finish_reason":
            columns[name] = [r.finish_reason.value for r in records]
        elif name == "row_id":
            columns[name] = [r.row_id or None for r in records]  # a purge leaves none
        else:
            columns[name] = [getattr(r, name) for r in records]
    return _of_columns(schema, columns)


def _of_columns(schema: pa.Schema, columns: dict[str, Any]) -> pa.RecordBatch:
    arrays = [_array(columns[field.name], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array):
        return values if values.type == kind else values.cast(kind)
    return pa.array(values, type=kind)


def _nullable(values: Any, missing: Bools, kind: pa.DataType) -> pa.Array:
    """An array with null for missing values; NaN stays NaN."""
    return pa.array(values, mask=missing, from_pandas=False).cast(kind)


def _kept(record: CompletionRecord, values: Sequence[Any]) -> Sequence[Any] | None:
    """Null if a completion's tokens are no longer kept."""
    return None if record.origins and not record.token_ids else values


def _text(record: CompletionRecord) -> str | None:
    """Null for an error, or if the text is not kept."""
    if record.finish_reason is FinishReason.ERROR or (record.origins and not record.token_ids):
        return None
    return record.text or (None if MASKED in record.token_ids else "")
