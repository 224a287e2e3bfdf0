"""Texts are judged by their response format, and a problem never quotes them."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from specbatch.pipeline.outputs.validation import problem_of
from specbatch.schemas.response_format import canonical

SCHEMA = canonical(
    {
        "type": "json_schema",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"$ref": "#/$defs/n"}},
            "required": ["name"],
            "$defs": {"n": {"type": "integer", "maximum": 9}},
        },
    }
)
ANY, CHOICE = canonical({"type": "json_object"}), canonical({"type": "choice", "choice": ["yes"]})


@pytest.mark.parametrize(
    ("form", "text", "ended", "problem"),
    [
        (SCHEMA, '{"name": "Anna", "n": 3}', True, None),
        (SCHEMA, '{"name": "Anna"}', False, None),  # whole, though nothing could follow
        (SCHEMA, '{"name": "An', False, "it was cut before its end"),
        (SCHEMA, '{"name": "An', True, "it is not JSON"),
        (SCHEMA, '{"name": "Secret"}', True, "`maxLength` is not fulfilled"),
        (SCHEMA, '{"name": "a", "n": 12}', True, "`maximum` is not fulfilled"),
        (SCHEMA, "{}", True, "`required` is not fulfilled"),
        (SCHEMA, "[" * 100_000, True, "it is not JSON"),
        (ANY, '{"a": 123456789012345678901234567890}', True, None),
        (ANY, "[]", True, "it is not a JSON object"),
        (CHOICE, "yes", True, None),
        (CHOICE, "ye", False, "it was cut before its end"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_problem_is_named_and_the_text_is_not(
    form: str, text: str, ended: bool, problem: str | None
) -> None:
    found = problem_of(form, text, ended)
    if problem is None:
        assert found is None
    else:
        assert found is not None
        assert problem in found
        assert "Secret" not in found


def test_nothing_is_fetched_for_a_reference() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        there = f"http://127.0.0.1:{server.getsockname()[1]}/x.json"
        form = canonical({"type": "json_schema", "schema": {"$ref": there}})
        assert problem_of(form, "{}", ended=True) is None, "it cannot be judged"
        with pytest.raises(BlockingIOError):  # nobody has called
            server.accept()


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"pattern": r"^\p{L}+$"}, '"é"'),
        ({"pattern": "^(a|a)+$"}, '"' + "a" * 60 + 'b"'),  # Python's search would take for ever
        ({"patternProperties": {"^(a|a)+$": {}}, "additionalProperties": False}, '{"aab": 1}'),
        ({"multipleOf": 0.01}, "0.07"),
        ({"multipleOf": 0.1}, "1e999"),
        ({"$schema": {}, "type": "string"}, '"a"'),
        ({"type": "array", "items": {"$ref": "#"}}, "[" * 400 + "]" * 400),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_the_judge_cannot_tell_is_no_problem(schema: dict[str, Any], text: str) -> None:
    assert problem_of(canonical({"type": "json_schema", "schema": schema}), text, True) is None
