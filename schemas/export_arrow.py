"""Arrow schemas of the exported sets. Imports pyarrow: the light base must not import it.

Every column has a `description` in its field's metadata; the reference is generated from these.
Token ids that privacy has masked are -1.
"""

from __future__ import annotations

import pyarrow as pa

from specbatch.schemas.arrow import TOP_TOKEN, list_of
from specbatch.schemas.exports import ExportKind

SCHEMA_VERSION = 1
DESCRIPTION = b"description"

_INT32, _INT64, _STRING, _DOUBLE = pa.int32(), pa.int64(), pa.string(), pa.float64()
# 100-ns units × price exceeds 64 bits when many completions are summed.
UNITS = pa.decimal128(38, 0)


_IDS = list_of(_INT32)
_LONGS = list_of(_INT64)
_NAMES = list_of(_STRING)
_LOGPROBS = list_of(pa.float32())


def _col(name: str, kind: pa.DataType, text: str, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={DESCRIPTION: text.encode()})


def _maybe(name: str, kind: pa.DataType, text: str) -> pa.Field:
    return _col(name, kind, text, nullable=True)


_JOB_ID = _col("job_id", _STRING, "the job")
_ROW_INDEX = _col("row_index", _INT64, "number of the input row, from 0")
_SAMPLE_INDEX = _col("sample_index", _INT32, "0 to n − 1")
_ROW_ID = _maybe("row_id", _STRING, "the row's id; null if it is not kept")
_TAG = _maybe("tag", _STRING, "the row's tag, if it has one")
_SEED = _col("seed", _INT64, "seed of this sample")
_PROMPT_TOKENS = _col("prompt_tokens", _INT32, "tokens of the prompt")
_COMPLETION_TOKENS = _col("completion_tokens", _INT32, "tokens of the completion")
_FINISH_REASON = _col(
    "finish_reason", _STRING, "`stop`, `tool_calls`, `length`, `error` or `cancelled`"
)
_PROPOSED = _col("proposed", _INT32, "draft tokens that the verifier checked")
_ACCEPTED = _col("accepted", _INT32, "draft tokens that the verifier accepted")
_PASSES = _col("verifier_passes", _INT32, "the verifier's passes for this completion")
_VERIFIER = _col("verifier", _STRING, "the model that decided the tokens")
_PROPOSER = _maybe("proposer", _STRING, "the job's draft model, if any")
_TICKS = (
    _col("prefill_ticks", _INT64, "device time for reading the prompt, in units of 100 ns"),
    _col("verify_ticks", _INT64, "… for deciding kept tokens"),
    _col("draft_ticks", _INT64, "… in draft models"),
    _col("rejected_ticks", _INT64, "… for rejected draft tokens"),
    _col("padding_ticks", _INT64, "… for rows that fill a tile or a recorded pass"),
    _col("overhead_ticks", _INT64, "… of steps outside the models"),
)
_PRICES = (
    _col("price_microusd", _INT64, "price of the device, millionths of a dollar an hour"),
    _col("ahead_ticks", _INT64, "time of the device that drafted ahead, in units of 100 ns"),
    _col("ahead_price_microusd", _INT64, "that device's price"),
)

COMPLETIONS = pa.schema(
    [
        _JOB_ID,
        _ROW_INDEX,
        _SAMPLE_INDEX,
        _ROW_ID,
        _TAG,
        _SEED,
        _PROMPT_TOKENS,
        _COMPLETION_TOKENS,
        _maybe("text", _STRING, "the completion; null for an error, or if it is not kept"),
        _maybe("token_ids", _IDS, "its tokens; null if they are not kept"),
        _FINISH_REASON,
        _maybe("error", _STRING, "why it failed, else null"),
        _col(
            "origins",
            list_of(pa.int8()),
            "of each token: 0 plain, 1 accepted draft, 2 corrected, 3 bonus",
        ),
        _maybe("logprobs", _LOGPROBS, "of each token, by the verifier; NaN: probability 0"),
        _maybe(
            "top_logprobs",
            list_of(list_of(TOP_TOKEN)),
            "the most likely tokens at each place, if asked for",
        ),
        _PROPOSED,
        _ACCEPTED,
        _col("proposed_at_depth", _IDS, "`proposed` by place in the draft"),
        _col("accepted_at_depth", _IDS, "`accepted` by place in the draft"),
        _PASSES,
        _maybe("steps", _LONGS, "of each pass: number of the verifier's step, in its process"),
        _maybe("pass_ticks", _LONGS, "of each pass: this completion's share of that step"),
        _maybe("sources", _NAMES, "names of the proposers that drafted for it"),
        _maybe("makers", _IDS, "of each pass with a draft: its proposer, an index in `sources`"),
        _maybe("drafted", _IDS, "of each pass with a draft: its tokens"),
        _maybe("rejected", _IDS, "of each corrected token: the draft's token"),
        _VERIFIER,
        _PROPOSER,
        *_TICKS,
        *_PRICES,
        _col("cost_usd", _DOUBLE, "its cost in the store"),
        _col("compute_sec", _DOUBLE, "its share of the verifier's time"),
        _col("draft_sec", _DOUBLE, "its share of the time for drafting ahead"),
        _col("decode_sec", _DOUBLE, "of `compute_sec`, in steps with a known price at depth 0"),
        _col("baseline_sec", _DOUBLE, "the time of these steps at depth 0"),
        _maybe("numeric_class", _STRING, "class in which its tokens were decided; null: unknown"),
        _maybe("model_fingerprint", _STRING, "of the model that decided them; null: unknown"),
        _maybe("reused_from", _STRING, "job/row/sample that it is a copy of; null: computed here"),
        _maybe("score", _DOUBLE, "by `output.best_by`, the higher the better; null: it has none"),
    ]
)

TOKENS = pa.schema(
    [
        _JOB_ID,
        _ROW_INDEX,
        _SAMPLE_INDEX,
        _col("position", _INT32, "place in the completion, from 0"),
        _col("token_id", _INT32, "the token"),
        _col("origin", _STRING, "`plain`, `accepted`, `corrected` or `bonus`"),
        _maybe("proposer", _STRING, "the proposer of its pass; null without a draft"),
        _maybe("verifier_step", _INT64, "number of the verifier's step, in its process"),
        _maybe("logprob", pa.float32(), "its log-probability by the verifier"),
        _maybe(
            "draft_position",
            _INT32,
            "place in the draft, from 0, of an accepted or corrected token",
        ),
        _maybe("rejected_token", _INT32, "the draft token that a corrected one replaced"),
        _col(
            "ticks",
            _INT64,
            "its share of its pass in units of 100 ns; the first token's also time outside passes",
        ),
        _col("price_microusd", _INT64, "price of the device, millionths of a dollar an hour"),
    ]
)

CORRECTIONS = pa.schema(
    [
        _JOB_ID,
        _ROW_INDEX,
        _SAMPLE_INDEX,
        _ROW_ID,
        _TAG,
        _VERIFIER,
        _maybe("prompt_ids", _IDS, "tokens of the prompt; null if they are gone"),
        _col("token_ids", _IDS, "the tokens after it, as the verifier decided them"),
        _col("logprobs", _LOGPROBS, "of each token, by the verifier; NaN: probability 0"),
        _col(
            "weights",
            _LOGPROBS,
            "of each token: 1, and at a rejection the number of draft tokens that it cost",
        ),
        _col("rejected_positions", _IDS, "places in `token_ids` where a draft was wrong"),
        _col("rejected_tokens", _IDS, "of each: the draft's token"),
        _col("rejected_proposers", _NAMES, "of each: its proposer"),
        _col("draft_positions", _IDS, "of each: its place in the draft, from 0"),
        _col("lost_tokens", _IDS, "of each: discarded draft tokens, itself and those after it"),
    ]
)

COSTS = pa.schema(
    [
        _JOB_ID,
        _ROW_INDEX,
        _SAMPLE_INDEX,
        _ROW_ID,
        _TAG,
        _FINISH_REASON,
        _PROMPT_TOKENS,
        _COMPLETION_TOKENS,
        _PROPOSED,
        _ACCEPTED,
        _PASSES,
        _VERIFIER,
        _PROPOSER,
        *_TICKS,
        _col("ticks", _INT64, "the sum of the six"),
        *_PRICES,
        _maybe(
            "cost_units",
            UNITS,
            "`ticks` × `price_microusd` + `ahead_ticks` × `ahead_price_microusd`: exact; null "
            "for completions without device time",
        ),
        _col("cost_usd", _DOUBLE, "the same in dollars: `cost_units` ÷ 3.6e16"),
    ]
)

TIME = pa.schema(
    [
        _JOB_ID,
        _col("session_id", _STRING, "session of a device in a worker process"),
        _col("group_index", _INT32, "the group of the attempt"),
        _col("generation", _INT32, "fencing token of the claim; 0: hints without a claim"),
        _col("stage", _STRING, "`propose` or `verify`"),
        _col("kept", pa.bool_(), "whether the results were kept; otherwise the time is lost"),
        _col("in_flight", pa.bool_(), "whether a worker still holds the group"),
        _col("device", _STRING, "kind of device"),
        _col("region", _STRING, "region of the device"),
        _col("tenure", _STRING, "`on-demand`, `reserved` or `spot`"),
        *_TICKS,
        _col("ticks", _INT64, "the sum of the six"),
        _col("price_microusd", _INT64, "price of the device, millionths of a dollar an hour"),
        _col("cost_units", UNITS, "`ticks` × `price_microusd`: exact"),
        _col("cost_usd", _DOUBLE, "the same in dollars: `cost_units` ÷ 3.6e16"),
    ]
)

SCHEMAS = {
    ExportKind.COMPLETIONS: COMPLETIONS,
    ExportKind.TOKENS: TOKENS,
    ExportKind.CORRECTIONS: CORRECTIONS,
    ExportKind.COSTS: COSTS,
    ExportKind.TIME: TIME,
}


def description(field: pa.Field) -> str:
    """The description of a column."""
    return str(field.metadata[DESCRIPTION].decode())
