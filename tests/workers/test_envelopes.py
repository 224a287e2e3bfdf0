"""What kombu gets to see of a Redis queue: messages, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbatch.workers.redis_transport import (
    MOST_BYTES,
    UnreadableError,
    check_envelope,
    quoted,
    unacked_entry,
)


def message(**others: Any) -> dict[str, Any]:
    properties = {
        "delivery_tag": "tag",
        "body_encoding": "base64",
        "delivery_info": {"exchange": "", "routing_key": "ingest"},
    } | others.pop("properties", {})
    return {
        "body": "e30=",
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {},
        "properties": properties,
    } | others


def test_a_message_is_one() -> None:
    check_envelope(json.dumps(message()).encode())
    entry = json.dumps([message(), "", "ingest"]).encode()
    assert unacked_entry(entry) == (message(), "", "ingest")


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"properties": {"delivery_tag": None}}, "delivery tag"),
        ({"properties": {"delivery_tag": ["a"]}}, "delivery tag"),
        ({"properties": {"delivery_info": {}}}, "delivered to"),
        ({"properties": {"body_encoding": "rot13"}}, "unknown way"),
        ({"properties": {"body_encoding": {}}}, "unknown way"),
        ({"body": "a"}, "base64"),
        ({"body": 5}, "not text"),
        ({"headers": [1]}, "headers"),
        ({"content-type": []}, "content type"),
    ],
)
def test_what_is_wrong_is_said(other: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnreadableError, match=reason):
        check_envelope(json.dumps(message(**other)))


def test_a_large_one_is_not_parsed() -> None:
    with pytest.raises(UnreadableError, match="are the most"):
        check_envelope(b" " * (MOST_BYTES + 1))


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(st.one_of(st.binary(max_size=64), st.builds(json.dumps, JSON)))
def test_anything_else_is_refused_with_a_reason(raw: bytes | str) -> None:
    with pytest.raises(UnreadableError):
        check_envelope(raw)
    with pytest.raises(UnreadableError):
        unacked_entry(raw)


def test_names_are_quoted_without_control_characters() -> None:
    assert "\x1b" not in quoted(b"\x1b]0;evil\x07")
    assert len(quoted("x" * 1000)) < 100
