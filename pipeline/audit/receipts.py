"""Receipts: what proves a prompt and an output after their texts are gone. Pure functions.

A receipt is made of a row's whole prompt and a completion's whole output before any of it is
reduced, and stays with the completion when that is purged. Its parts are digests keyed by the
installation's oldest encryption key: who only has the store cannot try out short texts on it. So
without a key there are no receipts. The audit log pins them like every fact of a completion.

    prompt     the token ids of the prompt, and the sampling values that the row brings itself
    output     the token ids, the text, why it ended, and which completion it is a copy of, if any
    logprobs   of the tokens, in single precision
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace

from specbatch.schemas.encryption import Cipher
from specbatch.schemas.mapper import as_float32
from specbatch.schemas.records import CompletionRecord, PromptRow

_ABOUT = "receipt"
_PROMPT, _OUTPUT, _LOGPROBS = range(3)


def with_receipts(
    cipher: Cipher | None,
    job_id: str,
    rows: Iterable[PromptRow],
    records: Sequence[CompletionRecord],
) -> list[CompletionRecord]:
    """The records, which are whole, with their receipts; unchanged without a key."""
    if cipher is None:
        return list(records)
    by_index = {row.row_index: row for row in rows}
    return [
        replace(
            record,
            receipt=cipher.sealed(_ABOUT, _parts(job_id, by_index[record.row_index], record)),
        )
        for record in records
    ]


def is_prompt(cipher: Cipher, receipt: bytes, job_id: str, row: PromptRow) -> bool:
    """Whether the row has the prompt of the receipt. Raises `UnknownKeyError`."""
    return cipher.unseals(receipt, _ABOUT, _PROMPT, _prompt(job_id, row))


def differing(
    cipher: Cipher, receipt: bytes, job_id: str, record: CompletionRecord
) -> tuple[str, ...]:
    """The parts of a whole completion that are not those of the receipt, by name."""
    parts = {
        "output": (_OUTPUT, _output(job_id, record)),
        "logprobs": (_LOGPROBS, _logprobs(job_id, record)),
    }
    return tuple(
        name
        for name, (place, part) in parts.items()
        if not cipher.unseals(receipt, _ABOUT, place, part)
    )


def _parts(job_id: str, row: PromptRow, record: CompletionRecord) -> list[bytes]:
    return [_prompt(job_id, row), _output(job_id, record), _logprobs(job_id, record)]


def _prompt(job_id: str, row: PromptRow) -> bytes:
    return _canonical([job_id, row.row_index, list(row.prompt_ids), dict(row.overrides)])


def _output(job_id: str, record: CompletionRecord) -> bytes:
    said = [list(record.token_ids), record.text, record.finish_reason.value]
    copied = [] if record.reused_from is None else [record.reused_from]
    return _canonical([*_key(job_id, record), *said, *copied])


def _logprobs(job_id: str, record: CompletionRecord) -> bytes:
    values = [math.nan if value != value else value for value in as_float32(record.logprobs)]
    return _canonical(_key(job_id, record)) + struct.pack(f"<{len(values)}f", *values)


def _key(job_id: str, record: CompletionRecord) -> list[object]:
    return [job_id, record.row_index, record.sample_index]


def _canonical(values: list[object]) -> bytes:
    """The same bytes for equal values, whether tuples or lists."""
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
