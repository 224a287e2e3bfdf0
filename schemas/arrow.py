"""Arrow schemas of every file specbatch writes. Imports pyarrow: the light base must not import it.

Prompts, drafts and results are a group's artefacts (Arrow IPC, inside the workspace); `OUTPUT` is
the Parquet schema of a job's published part files, documented in `pipeline/outputs/outputs.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from specbatch.schemas.provenance import TICK_KINDS

SCHEMA_VERSION = 2

_VERSION = {"specbatch_schema_version": str(SCHEMA_VERSION)}
JSON_TEXT = {"specbatch_content": "json"}  # metadata of a kept column of many types


def list_of(item: pa.DataType) -> pa.DataType:
    """A list without nulls."""
    return pa.list_(pa.field("item", item, nullable=False))


def changed_within(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """The type with a change of its parts, in lists and structs too."""
    types = pa.types
    if types.is_struct(kind):
        return pa.struct([field.with_type(changed_within(field.type, change)) for field in kind])
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return change(kind)
    item = kind.value_field.with_type(changed_within(kind.value_type, change))
    if types.is_fixed_size_list(kind):
        return pa.list_(item, kind.list_size)
    return pa.large_list(item) if types.is_large_list(kind) else pa.list_(item)


def _schema(*fields: pa.Field) -> pa.Schema:
    return pa.schema(fields, metadata=_VERSION)


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


_TOKENS = list_of(pa.int32())
_TOP_PAIRS = pa.struct(
    [_required("token_ids", _TOKENS), _required("logprobs", list_of(pa.float64()))]
)
_RECHECK = pa.struct(
    [
        _required("tokens", pa.int32()),
        _required("differing", pa.int32()),
        _required("largest_margin", pa.float64()),
    ]
)
TOP_TOKEN = pa.struct([_required("token_id", pa.int32()), _required("logprob", pa.float32())])

PROMPTS = _schema(
    _required("row_index", pa.int64()),
    _required("row_id", pa.string()),
    _required("prompt_ids", _TOKENS),
    _required("seed", pa.int64()),
    pa.field("tag", pa.string()),
    _required("n", pa.int32()),
    _required("overrides", pa.string()),  # JSON object with sorted keys
)

DRAFTS = _schema(
    _required("row_index", pa.int64()),
    _required("sample_index", pa.int32()),
    _required("token_ids", _TOKENS),
    _required("ticks", pa.int64()),  # 100-ns units of the device that made it …
    _required("price_microusd", pa.int64()),  # … and its price
)

REUSED_FROM = "reused_from"  # left out where nothing is

RESULTS = _schema(
    _required("row_index", pa.int64()),
    _required("sample_index", pa.int32()),
    _required("row_id", pa.string()),
    pa.field("tag", pa.string()),
    _required("seed", pa.int64()),
    _required("prompt_tokens", pa.int32()),
    _required("token_ids", _TOKENS),
    _required("text", pa.string()),
    _required("finish_reason", pa.string()),
    _required("origins", list_of(pa.int8())),
    _required("logprobs", list_of(pa.float64())),
    _required("proposed", pa.int32()),
    _required("accepted", pa.int32()),
    _required("verifier_passes", pa.int32()),
    _required("cost_usd", pa.float64()),
    _required("verifier", pa.string()),
    pa.field("proposer", pa.string()),
    pa.field("error", pa.string()),
    _required("proposed_at_depth", _TOKENS),
    _required("accepted_at_depth", _TOKENS),
    _required("compute_sec", pa.float64()),
    _required("draft_sec", pa.float64()),
    _required("decode_sec", pa.float64()),
    _required("baseline_sec", pa.float64()),
    pa.field("top_logprobs", list_of(_TOP_PAIRS)),  # null: not asked for
    _required("recheck", _RECHECK),
    _required("shadow_proposed", pa.int32()),
    _required("shadow_accepted", pa.int32()),
    _required("steps", list_of(pa.int64())),
    _required("pass_ticks", list_of(pa.int64())),
    _required("sources", list_of(pa.string())),
    _required("makers", list_of(pa.int16())),
    _required("drafted", list_of(pa.int32())),
    _required("rejected", _TOKENS),
    *(_required(f"{kind}_ticks", pa.int64()) for kind in TICK_KINDS),
    _required("price_microusd", pa.int64()),
    _required("ahead_ticks", pa.int64()),
    _required("ahead_price_microusd", pa.int64()),
    pa.field("numeric_class", pa.string()),
    pa.field("model_fingerprint", pa.string()),
    pa.field(REUSED_FROM, pa.string()),
)

# Columns of `RESULTS` that files of earlier versions lack.
LATER_RESULTS = ("numeric_class", "model_fingerprint", REUSED_FROM)

_TOOL_CALL = pa.struct([_required("name", pa.string()), _required("arguments", pa.string())])

OUTPUT = _schema(
    pa.field("id", pa.string()),
    _required("row_index", pa.int64()),
    _required("sample_index", pa.int32()),
    pa.field("text", pa.string()),
    pa.field("token_ids", _TOKENS),
    _required("finish_reason", pa.string()),
    pa.field("prompt_tokens", pa.int32()),
    pa.field("completion_tokens", pa.int32()),
    pa.field("seed", pa.int64()),
    pa.field("acceptance_rate", pa.float64()),
    pa.field("cost_usd", pa.float64()),
    pa.field("verifier", pa.string()),
    pa.field("proposer", pa.string()),
    pa.field("error", pa.string()),
    pa.field("logprobs", list_of(pa.float32())),
    pa.field("top_logprobs", list_of(list_of(TOP_TOKEN))),
    pa.field("numeric_class", pa.string()),
    pa.field("tool_calls", list_of(_TOOL_CALL)),
)
SCORED_OUTPUT = OUTPUT.append(pa.field("score", pa.float64()))  # of jobs with `output.best_by`

# Of picks: who wrote a row's text, in which job, instead of one verifier for all.
PICKED_OUTPUT = _schema(
    *(
        field.with_name("written_by") if field.name == "verifier" else field
        for field in SCORED_OUTPUT
    ),
    pa.field("job", pa.string()),
)


def output_schema(scored: bool) -> pa.Schema:
    """The columns of an output, without those of the input that it keeps."""
    return SCORED_OUTPUT if scored else OUTPUT
