"""A group's bulk files as Arrow IPC bytes (lz4; earlier versions: zstd): prompts, drafts, results.

Equal content gives equal bytes, so an artefact can be named by its hash and a retry overwrites a
file with itself. Bytes that are not such a file raise `ObjectError`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson
import pyarrow as pa

from specbatch.schemas import arrow, completion_rows
from specbatch.schemas.crash_points import CrashPoint, reach
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.policies import Place, Ruled, Ruling, Verdict
from specbatch.schemas.records import (
    CompletionRecord,
    FinishReason,
    PromptRow,
    Recheck,
    TopLogprobs,
)

# Beside the results.
_MEASURED, _REUSE, _RULINGS, _SCORES = b"measured", b"reuse", b"rulings", b"scores"
Rulings = Mapping[Place, Sequence[Ruled]]  # of policies
Columns = dict[str, list[Any]]  # of a file, by name
_PROPOSER = b"proposer"  # beside the drafts, which are all its own
_SEQUENCES = ("token_ids", "origins", "logprobs", "proposed_at_depth", "accepted_at_depth")


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """A proposer's guess at a sample's continuation. Only a hint: it may be wrong or lost."""

    row_index: int
    sample_index: int
    token_ids: tuple[int, ...]
    ticks: int = 0  # 100-ns units that the device took to make it …
    price_microusd: int = 0  # … and the price of an hour of it
    proposer: str = ""  # fingerprint of the model that wrote it; empty: not known


@dataclass(frozen=True, slots=True)
class ReuseNotes:
    """Of a group, by "row/sample": what recording needs to know of reuse."""

    answers: Mapping[str, str] = field(default_factory=dict)  # digest of its request, hexadecimal
    saved_usd: Mapping[str, float] = field(default_factory=dict)  # what the source of a copy cost
    checked: Mapping[str, bool] = field(default_factory=dict)  # whether it differed


NO_NOTES = ReuseNotes()


def write_prompts(rows: Sequence[PromptRow]) -> bytes:
    reach(CrashPoint.ARTEFACT_WRITE)
    return _write(
        arrow.PROMPTS,
        {
            "row_index": [row.row_index for row in rows],
            "row_id": [row.row_id for row in rows],
            "prompt_ids": [row.prompt_ids for row in rows],
            "seed": [row.seed for row in rows],
            "tag": [row.tag for row in rows],
            "n": [row.n for row in rows],
            "overrides": [_overrides_text(row.overrides) for row in rows],
        },
    )


def read_prompts(data: bytes) -> list[PromptRow]:
    return [
        PromptRow(
            item["row_index"],
            item["row_id"],
            tuple(item["prompt_ids"]),
            item["seed"],
            item["tag"],
            item["n"],
            _overrides(item["overrides"]),
        )
        for item in _read(arrow.PROMPTS, data)
    ]


def write_drafts(drafts: Sequence[DraftBlock]) -> bytes:
    """All of them by one model."""
    reach(CrashPoint.DRAFT_WRITE)
    return _write(
        arrow.DRAFTS,
        {
            "row_index": [draft.row_index for draft in drafts],
            "sample_index": [draft.sample_index for draft in drafts],
            "token_ids": [draft.token_ids for draft in drafts],
            "ticks": [draft.ticks for draft in drafts],
            "price_microusd": [draft.price_microusd for draft in drafts],
        },
        {_PROPOSER: drafts[0].proposer.encode()} if drafts else None,
    )


def read_drafts(data: bytes) -> list[DraftBlock]:
    columns, beside = _columns(arrow.DRAFTS, data)
    proposer = beside.get(_PROPOSER, b"").decode()
    columns["token_ids"] = list(map(tuple, columns["token_ids"]))
    return [
        DraftBlock(**dict(zip(columns, values, strict=True)), proposer=proposer)
        for values in zip(*columns.values(), strict=True)
    ]


def write_results(
    records: Sequence[CompletionRecord],
    measured: Mapping[str, float] | None = None,
    reuse: ReuseNotes = NO_NOTES,
    rulings: Rulings | None = None,
) -> bytes:
    """`measured`: figures that the attempt adds to its job's report, beside its records."""
    reach(CrashPoint.ARTEFACT_WRITE)
    flat = [completion_rows.provenance_values(record) for record in records]
    columns = {name: [values[name] for values in flat] for name in completion_rows.PROVENANCE}
    own = [name for name in arrow.RESULTS.names if name not in columns]
    columns |= {name: [getattr(record, name) for record in records] for name in own}
    columns["finish_reason"] = [record.finish_reason.value for record in records]
    columns["recheck"] = [_recheck(record.recheck) for record in records]
    columns["top_logprobs"] = [_structs(record.top_logprobs) for record in records]
    beside = {_MEASURED: orjson.dumps(dict(measured))} if measured else {}
    if reuse != NO_NOTES:
        beside[_REUSE] = orjson.dumps(asdict(reuse))
    if rulings:
        beside[_RULINGS] = orjson.dumps([[*place, ruled] for place, ruled in rulings.items()])
    scores = [(r.row_index, r.sample_index, r.score) for r in records if r.score is not None]
    if scores:
        beside[_SCORES] = orjson.dumps(scores)
    schema = arrow.RESULTS
    if not any(columns[arrow.REUSED_FROM]):  # so that earlier versions can read the file
        schema = schema.remove(schema.get_field_index(arrow.REUSED_FROM))
    return _write(schema, columns, beside or None)


@dataclass(frozen=True, slots=True)
class ResultsFile:
    """What `write_results` was given, of one reading of its bytes."""

    records: Sequence[CompletionRecord]
    reuse: ReuseNotes
    rulings: Rulings
    _measured: Mapping[str, float]  # empty in files of earlier versions

    def measured(self, rows: Container[int]) -> Mapping[str, float]:
        """The figures, which count once where groups share the file: for the one whose `rows` have
        the first record."""
        is_theirs = bool(self.records) and self.records[0].row_index in rows
        return self._measured if is_theirs else {}


def read_results(data: bytes) -> ResultsFile:
    columns, beside = _columns(arrow.RESULTS, data, arrow.LATER_RESULTS)
    measured = orjson.loads(beside.get(_MEASURED, b"{}"))
    reuse = orjson.loads(beside.get(_REUSE, b"{}"))
    rulings = orjson.loads(beside.get(_RULINGS, b"[]"))
    return ResultsFile(
        _records(columns, orjson.loads(beside.get(_SCORES, b"[]"))),
        ReuseNotes(**reuse),
        {(row, sample): [_ruled(**one) for one in ruled] for row, sample, ruled in rulings},
        {name: float(n) for name, n in measured.items()},
    )


def _records(columns: Columns, scores: Iterable[tuple[int, int, float]]) -> list[CompletionRecord]:
    """Made column by column, for a record has fifty of them."""
    by_place = {(row, sample): score for row, sample, score in scores}
    places = zip(columns["row_index"], columns["sample_index"], strict=True)
    of = {name: columns[name] for name in columns if name not in completion_rows.PROVENANCE}
    of |= {name: list(map(tuple, columns[name])) for name in _SEQUENCES}
    of |= completion_rows.provenance_columns(columns)
    of["finish_reason"] = list(map(FinishReason, columns["finish_reason"]))
    of["recheck"] = [Recheck(**found) for found in columns["recheck"]]
    of["top_logprobs"] = list(map(_pairs, columns["top_logprobs"]))
    of["score"] = list(map(by_place.get, places))
    return [
        CompletionRecord(**dict(zip(of, values, strict=True)))
        for values in zip(*of.values(), strict=True)
    ]


def _ruled(verdict: Mapping[str, Any], **others: Any) -> Ruled:
    said = Verdict(**dict(verdict) | {"ruling": Ruling(verdict["ruling"])})
    return Ruled(verdict=said, **others)


def _recheck(found: Recheck) -> dict[str, Any]:
    return {name: getattr(found, name) for name in Recheck.__slots__}  # `asdict` copies deeply


def _structs(tops: Iterable[TopLogprobs] | None) -> list[dict[str, Any]] | None:
    if tops is None:
        return None
    return [{"token_ids": ids, "logprobs": values} for ids, values in tops]


def _pairs(structs: Iterable[Mapping[str, Any]] | None) -> tuple[TopLogprobs, ...] | None:
    if structs is None:
        return None
    return tuple((tuple(item["token_ids"]), tuple(item["logprobs"])) for item in structs)


def _write(
    schema: pa.Schema, columns: Mapping[str, list[Any]], beside: Mapping[bytes, bytes] | None = None
) -> bytes:
    """`beside` goes with the batch, not into the schema: older versions can read the file."""
    arrays = [pa.array(columns[field.name], type=field.type) for field in schema]
    sink = pa.BufferOutputStream()
    # One thread, because the order of compressed buffers must not depend on the machine. lz4 takes
    # a third of the processor time of zstd, for a fifth more bytes.
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema), beside)
    return bytes(sink.getvalue())


def _read(schema: pa.Schema, data: bytes) -> Iterator[dict[str, Any]]:
    """The rows of a file."""
    columns, _ = _columns(schema, data)
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def _columns(
    schema: pa.Schema, data: bytes, later: Sequence[str] = ()
) -> tuple[Columns, Mapping[bytes, bytes]]:
    """The columns of a file, and what lies beside them. `later`: last columns that files of earlier
    versions lack."""
    with _opened(data) as reader:
        batch, beside = reader.get_batch_with_custom_metadata(0)
    table = pa.Table.from_batches([batch])
    for name in later:
        if name not in table.column_names:
            kind = schema.field(name)
            table = table.append_column(kind, pa.nulls(len(table), kind.type))
    if not table.schema.equals(schema, check_metadata=True):
        raise ObjectError(
            "an artefact has a layout of another version of specbatch; "
            "finish the job with the version that started it"
        )
    return table.to_pydict(), beside or {}


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    # A file is small: handing its buffers to other threads takes as long as unpacking them.
    options = pa.ipc.IpcReadOptions(use_threads=False)
    try:
        with pa.ipc.open_file(pa.BufferReader(data), options=options) as reader:
            yield reader
    except (pa.ArrowException, OSError) as error:
        raise ObjectError("an artefact is not an Arrow file; the workspace was damaged") from error


def _overrides_text(overrides: Mapping[str, Any]) -> str:
    return orjson.dumps(dict(overrides), option=orjson.OPT_SORT_KEYS).decode()


def _overrides(text: str) -> dict[str, Any]:
    return {name: _tuples(value) for name, value in orjson.loads(text).items()}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
