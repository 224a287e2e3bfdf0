"""What is kept of records, by mode, and which tokens a find takes with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger.builders import completion, new_job

from specbatch.pipeline.operations.given import proved_spec
from specbatch.pipeline.privacy.redactor import Redactor, Span
from specbatch.pipeline.privacy.retention import KEEP_ALL, NO_WORDS, token_places, tokens_in
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.schemas.encryption import Cipher
from specbatch.schemas.errors import InputError, UsageError
from specbatch.schemas.privacy import NOT_KEPT, PrivacyMode
from specbatch.schemas.provenance import Provenance
from specbatch.schemas.records import JobRow, RejectedRow
from specbatch.schemas.spec import load_spec
from support.databases import sqlite_store

MAIL = "anna@example.org"
CIPHER = Cipher([bytes(32)])


def bytes_decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def privacy(mode: PrivacyMode, cipher: Cipher | None = CIPHER) -> Privacy:
    return Privacy({"clinic": mode}, redactor=Redactor(), cipher=cipher)


def job_of(mode: PrivacyMode) -> JobRow:
    return sqlite_store().create_job(new_job(tenant="clinic", privacy=mode))[0]


@given(text=st.text(max_size=60))
def test_places_of_byte_tokens_are_those_of_their_characters(text: str) -> None:
    ids = list(text.encode("utf-8", "replace"))
    whole = bytes_decode(ids)
    places = token_places(ids, whole, bytes_decode)
    if "\N{REPLACEMENT CHARACTER}" in whole:
        return  # told apart from an unfinished character, or all tokens go
    assert places is not None
    for place, char in enumerate(whole):
        mine = [token for token, (start, stop) in enumerate(places) if start <= place < stop]
        assert bytes(ids[token] for token in mine) == char.encode()


def test_where_decoding_does_not_add_up_every_token_goes() -> None:
    def odd(ids: Sequence[int]) -> str:
        return f"<{bytes_decode(ids)}>"

    assert token_places([97, 98], "<ab>", odd) is None
    assert tokens_in(None, [Span(0, 1, "X")], 2) == {0, 1}


def test_a_token_goes_if_one_of_its_characters_is_in_a_find() -> None:
    words = {1: "to ", 2: "an", 3: "na@exa", 4: "mple.org, b", 5: "ye"}
    ids = (1, 2, 3, 4, 5)

    def decode(some: Sequence[int]) -> str:
        return "".join(words[token] for token in some)

    text = decode(ids)
    policy = privacy(PrivacyMode.REDACTED).text_policy(job_of(PrivacyMode.REDACTED))
    kept = policy.record(completion(0, token_ids=ids, text=text), text, decode)
    assert kept.text == "to [EMAIL], bye"
    assert kept.token_ids == (1, NOT_KEPT, NOT_KEPT, NOT_KEPT, 5)


@pytest.mark.parametrize("shown", [f"write to {MAIL[:4]}", "write to ", f"write to {MAIL} x"])
def test_a_find_that_a_stop_string_cut_off_is_gone_whole(shown: str) -> None:
    whole = f"write to {MAIL} x"
    ids = tuple(whole.encode())
    policy = privacy(PrivacyMode.REDACTED).text_policy(job_of(PrivacyMode.REDACTED))
    kept = policy.record(completion(0, token_ids=ids, text=shown), whole, bytes_decode)
    left = bytes(token for token in kept.token_ids if token != NOT_KEPT).decode()
    assert left == "write to  x"
    assert "anna" not in kept.text


def test_nothing_is_kept_that_was_not_written() -> None:
    record = completion(0, provenance=Provenance(rejected=(5, 6)), error=f"about '{MAIL}'")
    for mode in (PrivacyMode.REDACTED, PrivacyMode.HASH_ONLY):
        kept = privacy(mode).text_policy(job_of(mode)).record(record, "a b", bytes_decode)
        assert kept.provenance.rejected == (NOT_KEPT, NOT_KEPT)
        assert kept.top_logprobs is None
        assert kept.error == "about […]"
        assert (kept.origins, kept.logprobs) == (record.origins, record.logprobs)
    assert KEEP_ALL.record(record, "a b", bytes_decode) is record


def test_hash_only_keeps_neither_texts_nor_tokens() -> None:
    policy = privacy(PrivacyMode.HASH_ONLY).text_policy(job_of(PrivacyMode.HASH_ONLY))
    kept = policy.record(completion(0, tag="de"), "a b", bytes_decode)
    assert (kept.text, kept.token_ids) == ("", (NOT_KEPT,) * 3)
    assert kept.row_id == policy.row_id("row-0") != "row-0"
    assert kept.tag == policy.tag("de") != "de"
    rejected = policy.rejected(RejectedRow(1, "Anna", "duplicate_id", "the id 'Anna' twice"))
    assert rejected == RejectedRow(1, policy.row_id("Anna"), "duplicate_id", NO_WORDS)


def test_ids_without_personal_data_stay_under_redacted() -> None:
    policy = privacy(PrivacyMode.REDACTED).text_policy(job_of(PrivacyMode.REDACTED))
    assert policy.row_id("row-17") == "row-17"
    assert len(policy.row_id(MAIL)) == 32
    assert policy.tag(f"of {MAIL}") == "of [EMAIL]"


def test_errors_keep_their_kind_and_lose_what_they_quote() -> None:
    said = [ValueError(f"no {MAIL}"), InputError("file 'a b' is gone"), KeyError("Anna")]
    by_mode = {
        PrivacyMode.FULL: [f"ValueError: no {MAIL}", "file 'a b' is gone", "KeyError: 'Anna'"],
        PrivacyMode.REDACTED: ["ValueError: no [EMAIL]", "file […] is gone", "KeyError: […]"],
        PrivacyMode.HASH_ONLY: [
            f"ValueError ({NO_WORDS})",
            "file […] is gone",
            f"KeyError ({NO_WORDS})",
        ],
    }
    for mode, words in by_mode.items():
        assert [privacy(mode).error(job_of(mode), error) for error in said] == words
    assert privacy(PrivacyMode.REDACTED).error(None, said[0]) == f"ValueError ({NO_WORDS})"


def test_an_order_is_shown_without_its_texts_and_pinned_to_its_mode() -> None:
    spec = load_spec(
        {
            "name": f"of {MAIL}",
            "tenant": "clinic",
            "input": {
                "uri": "s3://bucket/in",
                "template": f"As Anna or {MAIL}: {{body}}",
                "system": f"Ask {MAIL}.",
            },
            "output": {"uri": "s3://bucket/out"},
            "verifier": "big",
            "proposer": "small",
            "sampling": {
                "stop": ["Anna", MAIL],
                "bad_words": [[1, 2]],
                "max_tokens": 7,
                "response_format": {"type": "choice", "choice": [f"Anna {MAIL}", "no"]},
            },
            "speculation": {"tag_depths": [[f"tag {MAIL}", 2]]},
        }
    ).model_dump(mode="json")
    order = new_job(tenant="clinic", spec=spec, name=spec["name"], idempotency_key=MAIL)
    for mode in (PrivacyMode.REDACTED, PrivacyMode.HASH_ONLY):
        kept = privacy(mode).as_stored(order)
        assert kept.privacy is mode
        said = repr((kept.name, kept.spec, kept.spec_digest, kept.idempotency_key))
        assert MAIL not in said
        assert kept.spec["sampling"]["max_tokens"] == 7
        assert kept.spec["sampling"]["bad_words"] == []
        templates = {name: kept.spec["input"][name] for name in ("template", "system")}
        assert kept.spec["input"] == spec["input"] | templates
        if mode is PrivacyMode.REDACTED:
            assert list(templates.values()) == ["As Anna or [EMAIL]: {body}", "Ask [EMAIL]."]
        else:
            assert [len(text) for text in templates.values()] == [32, 32]
        assert ("Anna" in said) is (mode is PrivacyMode.REDACTED)
        stored, _ = sqlite_store().create_job(kept)
        assert stored.spec == spec
        shown = dict(privacy(mode).templates(stored))
        assert shown == (templates if mode is PrivacyMode.REDACTED else {})
        assert privacy(PrivacyMode.FULL).templates(stored) == list(shown.items())
    assert privacy(PrivacyMode.FULL).as_stored(order) is order


@pytest.mark.parametrize(
    "texts",
    [
        {"input": {"template": "Who is {name}?", "system": "Say it."}},
        {"sampling": {"stop": [MAIL], "stop_token_ids": [5], "logit_bias": {"7": 1.0}}},
        {"sampling": {"response_format": {"type": "json_object"}}},
        {"speculation": {"tag_depths": [[f"of {MAIL}", 2]]}},
        {"policies": [{"use": "patterns", "patterns": {"mail": MAIL}}]},
        {"output": {"keep_best": 1, "best_by": {"use": "judge", "prompt": f"of {MAIL}? {{text}}"}}},
        {"output": {"keep_best": 1, "best_by": {"use": "ours", "options": {"about": MAIL}}}},
        {"name": f"for {MAIL}"},
    ],
)
def test_the_spec_of_a_purged_job_is_proved_by_its_texts(texts: dict[str, Any]) -> None:
    values: dict[str, Any] = {
        "tenant": "clinic",
        "input": {"uri": "/in.jsonl"},
        "output": {"uri": "/out"},
        "sampling": {"n": 2, "temperature": 0.5},
        "verifier": "big",
    }
    for name, part in texts.items():
        values[name] = values[name] | part if isinstance(values.get(name), dict) else part
    spec = load_spec(values)
    order = new_job(tenant="clinic", spec=spec.model_dump(mode="json"), spec_digest=spec.digest())
    stored = privacy(PrivacyMode.HASH_ONLY).as_stored(order)
    made = sqlite_store().create_job(stored)[0]
    job = replace(made, spec=stored.spec, purged_at=1.0)  # a purge deletes the whole one
    assert MAIL not in repr(job)
    assert proved_spec(CIPHER, job, texts) == spec
    for others in (None, {"output": {"uri": "/elsewhere"}}):
        with pytest.raises(UsageError, match="--spec FILE"):
            proved_spec(CIPHER, job, others)


def test_a_key_is_needed_and_workers_may_not_keep_less_than_was_submitted() -> None:
    keyless = privacy(PrivacyMode.REDACTED, cipher=None)
    with pytest.raises(UsageError, match="kept redacted, which needs SPECBATCH_ENCRYPTION_KEY"):
        keyless.as_stored(new_job(tenant="clinic"))
    with pytest.raises(UsageError, match="needs SPECBATCH_ENCRYPTION_KEY"):
        keyless.check(job_of(PrivacyMode.REDACTED))
    assert keyless.words(job_of(PrivacyMode.REDACTED), f"of {MAIL}") == "of [EMAIL]"
    strict = privacy(PrivacyMode.HASH_ONLY)
    with pytest.raises(UsageError, match="the settings here ask for hash-only for tenant 'clinic'"):
        strict.check(job_of(PrivacyMode.REDACTED))
    privacy(PrivacyMode.FULL).check(job_of(PrivacyMode.REDACTED))
