"""What a terminal would obey is spelled out; everything else stays as it is."""

from __future__ import annotations

import json
import unicodedata

import pytest

from specbatch.schemas.visible import one_line, visible, visible_json

BIDIRECTIONAL = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def test_every_control_and_bidirectional_character_is_spelled_out() -> None:
    controls = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) == "Cc"]
    assert {c for c in (*controls, *BIDIRECTIONAL) if visible(c) == c} == {"\n"}
    assert visible("a\x1b]0;b\x07\u202e") == "a\\x1b]0;b\\x07\\u202e"
    assert visible("\udc80").encode() == b"\\udc80"


@pytest.mark.parametrize(
    "text", ["plain", "Grüße", "日本語", "مرحبا", "שלום", "👩‍🚀", "a\nb", "\\x1b"]
)
def test_what_people_write_stays(text: str) -> None:
    assert visible(text) == text


def test_a_sentence_is_one_line() -> None:
    assert one_line("row a\nerror: forged") == "row a\\nerror: forged"


def test_json_stays_json_and_means_the_same() -> None:
    value = {"a\u202e": ["\x1b\x07\x7f\x9b\u2066", {"b": "Grüße"}]}
    said = visible_json(value)
    assert visible(said) == said
    assert json.loads(said) == value
    assert "Grüße" in said
