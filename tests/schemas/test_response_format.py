"""Forms of outputs: one canonical text for each, whichever way it is written."""

from __future__ import annotations

from typing import Any

import pytest

from specbatch.schemas.errors import SpecError
from specbatch.schemas.response_format import canonical, parsed
from specbatch.schemas.spec import load_spec

SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, ""),
        ("", ""),
        ({"type": "text"}, ""),
        ({"type": "text", "schema": None}, ""),
        ({"type": "json_object"}, '{"type":"json_object"}'),
        ('{"type": "json_object"}', '{"type":"json_object"}'),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {}}},
            '{"type":"json_schema","schema":{}}',
        ),
        ({"type": "json_schema", "schema": True}, '{"type":"json_schema","schema":true}'),
        ({"type": "regex", "regex": "a+"}, '{"type":"regex","regex":"a+"}'),
        ({"type": "choice", "choice": ("a", "b")}, '{"type":"choice","choice":["a","b"]}'),
        ({"type": "lark", "lark": "start: /a/"}, '{"type":"lark","lark":"start: /a/"}'),
    ],
    ids=str,
)
def test_a_form_has_one_text(given: object, text: str) -> None:
    assert canonical(given) == text
    assert canonical(text) == text


def test_the_order_of_properties_is_kept() -> None:
    kind, schema = parsed(canonical({"type": "json_schema", "schema": SCHEMA}))
    assert (kind, list(schema["properties"])) == ("json_schema", ["b", "a"])
    assert parsed('{"type":"json_object"}') == ("json_object", None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (5, 'an object with a "type"'),
        ({"type": 5}, 'an object with a "type"'),
        ("{", "is not JSON"),
        ({"type": "xml"}, "has type 'xml': it is one of text, json_object"),
        ({"type": "json_schema"}, "needs a JSON schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "needs a JSON schema"),
        ({"type": "json_schema", "schema": [1]}, "needs a JSON schema"),
        ({"type": "regex"}, 'needs a text under "regex"'),
        ({"type": "choice", "choice": []}, "needs a list of texts"),
        ({"type": "choice", "choice": ["a", ""]}, "none of them empty"),
        ({"type": "lark", "lark": 1}, 'needs a text under "lark"'),
        ({"type": "regex", "regex": "a" * 300_000}, "more than 262,144"),
    ],
    ids=str,
)
def test_what_is_no_form_is_refused_in_words(given: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        canonical(given)


@pytest.mark.parametrize(
    "other", [{"min_tokens": 3}, {"ignore_eos": True}, {"stop_token_ids": [5]}], ids=str
)
def test_what_contradicts_a_form_is_refused_by_name(other: dict[str, Any]) -> None:
    sampling = {"response_format": {"type": "json_object"}, **other}
    with pytest.raises(SpecError, match=f"leave {next(iter(other))} out"):
        load_spec(
            {"input": {"uri": "i"}, "output": {"uri": "o"}, "verifier": "v", "sampling": sampling}
        )
