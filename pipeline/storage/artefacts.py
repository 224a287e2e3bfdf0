"""A group's bulk files as Arrow IPC bytes (zstd): prompts, drafts, results.

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
    proposer = (_beside(data, _PROPOSER) or b"").decode()
    return [
        DraftBlock(**item | {"token_ids": tuple(item["token_ids"]), "proposer": proposer})
        for item in _read(arrow.DRAFTS, data)
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
    columns["origins"] = [[int(origin) for origin in record.origins] for record in records]
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


def read_results(data: bytes) -> list[CompletionRecord]:
    found = _beside(data, _SCORES)
    scores = {(row, sample): score for row, sample, score in orjson.loads(found or b"[]")}
    return [
        CompletionRecord(
            **{
                name: value
                for name, value in item.items()
                if name not in completion_rows.PROVENANCE
            }
            | {name: tuple(item[name]) for name in _SEQUENCES}
            | completion_rows.provenance_fields(item)
            | {"finish_reason": FinishReason(item["finish_reason"])}
            | {"recheck": Recheck(**item["recheck"])}
            | {"top_logprobs": _pairs(item["top_logprobs"])}
            | {"score": scores.get((item["row_index"], item["sample_index"]))}
        )
        for item in _read(arrow.RESULTS, data, arrow.LATER_RESULTS)
    ]


def read_measured(data: bytes, rows: Container[int]) -> dict[str, float]:
    """The `measured` of `write_results`; empty in files of earlier versions.

    It counts once where groups share the file: for the one whose `rows` have the first record.
    """
    found = _beside(data, _MEASURED)
    with _opened(data) as reader:
        in_file = reader.get_batch(0).column("row_index")
        is_theirs = len(in_file) > 0 and in_file[0].as_py() in rows
    if found is None or not is_theirs:
        return {}
    return {name: float(n) for name, n in orjson.loads(found).items()}


def read_reuse(data: bytes) -> ReuseNotes:
    """The `reuse` of `write_results`."""
    found = _beside(data, _REUSE)
    return NO_NOTES if found is None else ReuseNotes(**orjson.loads(found))


def read_rulings(data: bytes) -> Rulings:
    """The `rulings` of `write_results`."""
    found = _beside(data, _RULINGS)
    return {
        (row, sample): [_ruled(**one) for one in ruled]
        for row, sample, ruled in (orjson.loads(found) if found else ())
    }


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
    # One thread, because the order of compressed buffers must not depend on the machine.
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema), beside)
    return bytes(sink.getvalue())


def _read(schema: pa.Schema, data: bytes, later: Sequence[str] = ()) -> Iterable[dict[str, Any]]:
    """The rows of a file. `later`: last columns that files of earlier versions lack."""
    with _opened(data) as reader:
        table = reader.read_all()
    for name in later:
        if name not in table.column_names:
            kind = schema.field(name)
            table = table.append_column(kind, pa.nulls(len(table), kind.type))
    if not table.schema.equals(schema, check_metadata=True):
        raise ObjectError(
            "an artefact has a layout of another version of specbatch; "
            "finish the job with the version that started it"
        )
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _beside(data: bytes, name: bytes) -> bytes | None:
    with _opened(data) as reader:
        found = reader.get_batch_with_custom_metadata(0).custom_metadata
    return None if found is None else found.get(name)


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    try:
        with pa.ipc.open_file(pa.BufferReader(data)) as reader:
            yield reader
    except (pa.ArrowException, OSError) as error:
        raise ObjectError("an artefact is not an Arrow file; the workspace was damaged") from error


def _overrides_text(overrides: Mapping[str, Any]) -> str:
    return orjson.dumps(dict(overrides), option=orjson.OPT_SORT_KEYS).decode()


def _overrides(text: str) -> dict[str, Any]:
    return {name: _tuples(value) for name, value in orjson.loads(text).items()}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
