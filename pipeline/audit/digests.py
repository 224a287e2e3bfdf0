"""Canonical bytes of what the audit log pins, and their digests.

Every part has a tag and its length in front, so that no two records have the same bytes. Numbers
are little-endian, floats are IEEE. Values that databases do not distinguish have one form here:
log-probabilities are in single precision, all NaN are equal, and -0 is 0 in other floats.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from operator import attrgetter
from typing import Any

from specbatch.schemas.mapper import float32_array
from specbatch.schemas.provenance import Ticks
from specbatch.schemas.records import CompletionRecord, RejectedRow, TopLogprobs

_CONTENT = b"specbatch completion content 1\n"
_FACTS = b"specbatch completion facts 1\n"
_CHAINED = b"specbatch completion 1\n"
_REJECTED = b"specbatch rejected row 1\n"
_ENTRY = b"specbatch audit entry 1\n"

KEPT_BYTES = 32  # of a completion's digest, which its row keeps: those of its content


def _tagged(tag: bytes, data: bytes) -> bytes:
    return tag + len(data).to_bytes(8, "little") + data


def _text(value: str | None) -> bytes:
    return b"-" if value is None else _tagged(b"t", value.encode("utf-8", "surrogatepass"))


def _later_text(value: str | None) -> bytes:
    """A fact that earlier completions lack. Its absence leaves their digests unchanged."""
    return b"" if value is None else _text(value)


def _later_bytes(value: bytes | None) -> bytes:
    """The same of bytes."""
    return b"" if value is None else _tagged(b"b", value)


def _later_source(value: str | None) -> bytes:
    """The same of a completion's name, told apart from a text."""
    return b"" if value is None else _tagged(b"r", value.encode())


def _later_double(value: float | None) -> bytes:
    """The same of a number."""
    return b"" if value is None else _double(value)


def _integer(value: int) -> bytes:
    return b"i" + value.to_bytes(8, "little", signed=True)


def _double(value: float) -> bytes:
    return b"d" + struct.pack("<d", value + 0.0 if value == value else math.nan)


def _array(numbers: array[Any]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return _tagged(numbers.typecode.encode(), numbers.tobytes())


_NO_SMALL_INTEGERS, _NO_INTEGERS = _array(array("i")), _array(array("q"))


def _small_integers(values: Sequence[int]) -> bytes:
    return _array(array("i", values)) if values else _NO_SMALL_INTEGERS


def _integers(values: Sequence[int]) -> bytes:
    return _array(array("q", values)) if values else _NO_INTEGERS


def _floats(values: Iterable[float]) -> bytes:
    return _array(float32_array(values))


def _texts(values: Iterable[str]) -> bytes:
    return _tagged(b"s", b"".join(map(_text, values)))


def _most_likely(tops: tuple[TopLogprobs, ...] | None) -> bytes:
    if tops is None:
        return b"-"
    ids = tuple(chain.from_iterable(ids for ids, _ in tops))
    values = tuple(chain.from_iterable(values for _, values in tops))
    return b"m" + _small_integers(ids) + _floats(values)


def _ticks(ticks: Ticks) -> bytes:
    return _integers(ticks.in_order)


Encode = Callable[[Any], bytes]

# The content of a completion. A purge may empty any of it.
CONTENT: Mapping[str, Encode] = {
    "row_id": _text,
    "tag": _text,
    "token_ids": _small_integers,
    "text": _text,
    "logprobs": _floats,
    "top_logprobs": _most_likely,
    "error": _text,
    "provenance.rejected": _small_integers,
}
# The facts of a completion. A purge leaves them unchanged.
FACTS: Mapping[str, Encode] = {
    "row_index": _integer,
    "sample_index": _integer,
    "seed": _integer,
    "prompt_tokens": _integer,
    "finish_reason": _text,
    "origins": _small_integers,
    "proposed": _integer,
    "accepted": _integer,
    "verifier_passes": _integer,
    "cost_usd": _double,
    "verifier": _text,
    "proposer": _text,
    "proposed_at_depth": _integers,
    "accepted_at_depth": _integers,
    "compute_sec": _double,
    "draft_sec": _double,
    "decode_sec": _double,
    "baseline_sec": _double,
    "provenance.steps": _integers,
    "provenance.pass_ticks": _integers,
    "provenance.sources": _texts,
    "provenance.makers": _integers,
    "provenance.drafted": _integers,
    "ticks": _ticks,
    "price_microusd": _integer,
    "ahead_ticks": _integer,
    "ahead_price_microusd": _integer,
    "numeric_class": _later_text,
    "model_fingerprint": _later_text,
    "receipt": _later_bytes,
    "reused_from": _later_source,
    "score": _later_double,
}

_get_content = attrgetter(*CONTENT)
_get_facts = attrgetter(*FACTS)


def completion_digest(record: CompletionRecord) -> bytes:
    """64 bytes: the digest of a completion's content, then that of its facts.

    The row keeps the first `KEPT_BYTES`, the log a digest of all (`chained`). A record and its copy
    from any store have the same digest. Raises `TypeError`, `ValueError` or `OverflowError` for
    values that specbatch never stores.
    """
    return content_digest(record) + facts_digest(record)


def content_digest(record: CompletionRecord) -> bytes:
    values = _get_content(record)
    return _digest(_CONTENT, [f(v) for f, v in zip(CONTENT.values(), values, strict=True)])


def facts_digest(record: CompletionRecord) -> bytes:
    values = _get_facts(record)
    return _digest(_FACTS, [f(v) for f, v in zip(FACTS.values(), values, strict=True)])


def chained(digest: bytes) -> str:
    """A completion's digest as the log keeps it."""
    return sha256(_CHAINED + digest).hexdigest()


def rejected_digest(row: RejectedRow) -> str:
    """The digest of a quarantined row as the log keeps it."""
    parts = [_integer(row.row_index), _text(row.row_id), _text(row.code), _text(row.reason)]
    return _digest(_REJECTED, parts).hex()


def canonical_json(values: Mapping[str, Any]) -> str:
    """JSON that is the same for equal values: sorted, without spaces, in ASCII."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)


def entry_hash(
    job_id: str, number: int, kind: str, at: float, actor: str, payload: str, previous: bytes
) -> bytes:
    """The hash of an entry, which the next entry names."""
    parts = [_text(job_id), _integer(number), _text(kind), _double(at), _text(actor)]
    return _digest(_ENTRY, [*parts, _text(payload), _tagged(b"b", previous)])


def _digest(domain: bytes, parts: list[bytes]) -> bytes:
    return sha256(domain + b"".join(parts)).digest()
