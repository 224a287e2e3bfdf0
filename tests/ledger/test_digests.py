"""Digests: all that is kept counts, and nothing that databases cannot tell apart."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from ledger.audited import record

from specbatch.pipeline.audit import entries
from specbatch.pipeline.audit.digests import (
    CONTENT,
    FACTS,
    canonical_json,
    chained,
    completion_digest,
    rejected_digest,
)
from specbatch.schemas.audit import EMPTY, EntryKind
from specbatch.schemas.mapper import as_kept
from specbatch.schemas.provenance import Provenance, Ticks
from specbatch.schemas.records import CompletionRecord, FinishReason, Recheck, RejectedRow

BEFORE = record(3, 1)
# Sums are in the job's report, verdicts of policies in the log.
NOT_STORED = ("recheck", "shadow_proposed", "shadow_accepted", "rulings")


def test_every_field_of_a_completion_is_in_its_digest_or_not_stored() -> None:
    named = {name.partition(".")[0] for name in (*CONTENT, *FACTS, *NOT_STORED)}
    assert named == {field.name for field in fields(CompletionRecord)}
    parts = {name.partition(".")[2] for name in (*CONTENT, *FACTS) if "." in name}
    assert parts == {field.name for field in fields(Provenance)}


def other(value: Any) -> Any:
    match value:
        case FinishReason():
            return FinishReason.LENGTH
        case None:
            return ""
        case str():
            return value + "\x00"
        case bytes():
            return value + b"\x00"
        case float():
            return math.nextafter(value, math.inf)
        case int():
            return value - 1
        case Ticks():
            return replace(value, padding=value.padding + 1)
        case tuple():
            return value[:-1]
        case _:
            raise AssertionError(value)


@pytest.mark.parametrize("name", [*CONTENT, *FACTS])
def test_every_field_changes_its_half_of_the_digest(name: str) -> None:
    field, _, part = name.partition(".")
    value = getattr(BEFORE, field)
    changed = replace(value, **{part: other(getattr(value, part))}) if part else other(value)
    after = completion_digest(replace(BEFORE, **{field: changed}))
    before = completion_digest(BEFORE)
    assert len(after) == 64
    assert (after[:32] != before[:32]) == (name in CONTENT)
    assert (after[32:] != before[32:]) == (name in FACTS)
    assert chained(after) != chained(before)


def test_what_is_not_kept_counts_for_nothing() -> None:
    changed = replace(BEFORE, recheck=Recheck(3, 2, 1.0), shadow_proposed=4, shadow_accepted=5)
    assert completion_digest(changed) == completion_digest(BEFORE)


def test_a_record_and_what_stores_give_back_have_the_same_digest() -> None:
    rough = replace(
        BEFORE,
        logprobs=(-0.1, -math.inf, math.nan),
        top_logprobs=(((7,), (-0.1,)), ((0,), (math.inf,)), ((6,), (-0.0,))),
        cost_usd=-0.0,
    )
    assert completion_digest(rough) == completion_digest(as_kept(rough))
    assert completion_digest(rough) == completion_digest(replace(rough, cost_usd=0.0))
    assert completion_digest(rough) == completion_digest(
        replace(rough, logprobs=(-0.1, math.nan, -math.nan))
    )


def test_parts_cannot_be_shifted_into_each_other() -> None:
    one = completion_digest(replace(BEFORE, row_id="ab", tag="c"))
    assert one != completion_digest(replace(BEFORE, row_id="a", tag="bc"))
    none = completion_digest(replace(BEFORE, tag=None))
    assert none != completion_digest(replace(BEFORE, tag=""))
    assert completion_digest(replace(BEFORE, top_logprobs=None)) != (
        completion_digest(replace(BEFORE, top_logprobs=()))
    )


def test_text_that_no_database_holds_as_it_is_has_a_digest() -> None:
    texts = ["\x00", "\ud800", "\x1a0000", "\U0010ffff"]
    assert len({completion_digest(replace(BEFORE, text=text)) for text in texts}) == len(texts)


def test_a_digest_does_not_change_from_version_to_version() -> None:
    """Logs that were written once must be checked for ever."""
    scored = replace(BEFORE, logprobs=(-0.5, -0.25, -2.0))
    assert chained(completion_digest(scored)) == SCORED
    copied = replace(scored, score=None)
    assert chained(completion_digest(copied)) == COPIED
    sealed = replace(copied, reused_from=None)
    assert chained(completion_digest(sealed)) == WITH_RECEIPT
    whole = replace(sealed, receipt=None)
    assert chained(completion_digest(whole)) == WITH_MODEL
    plain = replace(whole, model_fingerprint=None)
    assert chained(completion_digest(plain)) == WITH_CLASS
    assert chained(completion_digest(replace(plain, numeric_class=None))) == PLAIN
    row = RejectedRow(12, None, "null_prompt", "nothing")
    assert rejected_digest(row) == REJECTED
    entry = entries.follow(EMPTY, "job", EntryKind.EXPORTED, 1.5, "eve@host", {"b": 1, "a": "ü"})
    assert entry.payload == '{"a":"\\u00fc","b":1}' == canonical_json({"a": "ü", "b": 1})
    assert entry.hash.hex() == ENTRY


SCORED = "e613ec83f62a3d6c6e3e82b5acda9f9c18a2c08ea86081522891fbbe5573e7ac"
COPIED = "9b57f91932d36a8a5842b144358dba12779b8ff2bd53bdc789b3a0eaca123676"
WITH_RECEIPT = "27946db12afc74b618cbfe44a85fab7312c90cfd6802584e7c4f2e0249fdc94c"
WITH_MODEL = "398fd8b8bb927f285b62dbf3c9bf9619f6c22a35c5af12334693478924a90a35"
WITH_CLASS = "8f6363faa484594ff6da80ee25cf835b7738c0c7e7fbc8ec098b86e9efcc7f4a"
PLAIN = "22978f4d12e5562f8618588b784f53aef63962ebbc657aa2b316692ee9cda2be"
REJECTED = "8deb0599a7dfa488f23874c341be226cfd288bc44f72c0024e751a59e8bf711e"
ENTRY = "de5aa95fca7d255088947d9cc6f86e0051dffa100ac34d35ea1a089b6ded4f93"
