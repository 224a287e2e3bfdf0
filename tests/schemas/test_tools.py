"""Tools and choices among them: one text for each, and refusals that name the thing."""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest

from specbatch.schemas.errors import SpecError
from specbatch.schemas.response_format import parsed
from specbatch.schemas.spec import JobSpec, load_spec
from specbatch.schemas.tools import (
    MOST_TOOLS,
    call_form,
    canonical_choice,
    canonical_tools,
    form_of,
    names_of,
)

EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [choice(name) for name in names]},
    }


def spec_of(**sampling: Any) -> JobSpec:
    return load_spec(
        {"input": {"uri": "i"}, "output": {"uri": "o"}, "verifier": "v", "sampling": sampling}
    )


def refused(**sampling: Any) -> str:
    with pytest.raises(SpecError) as raised:
        spec_of(**sampling)
    said = str(raised.value)
    assert "\n" not in said
    return said


def test_tools_are_shown_to_the_model_without_what_is_for_the_server() -> None:
    given = [tool("f", description="Says.", parameters=CITY, strict=True), tool("g")]
    text = canonical_tools(given)
    assert orjson.loads(text) == [
        tool("f", description="Says.", parameters=CITY),
        tool("g", parameters=EMPTY),
    ]
    assert canonical_tools(text) == text
    assert names_of(text) == ["f", "g"]


def test_the_order_of_parameters_is_kept() -> None:
    both = [{"type": "object", "properties": {key: {} for key in names}} for names in ("ab", "ba")]
    one, other = (canonical_tools([tool(parameters=schema)]) for schema in both)
    assert one != other


@pytest.mark.parametrize("given", [None, [], (), "", "null", "[]"])
def test_no_tools(given: object) -> None:
    assert canonical_tools(given) == ""


@pytest.mark.parametrize("given", ["auto", "none", "required", choice("f"), allowed("auto", "f")])
def test_a_choice_is_its_own_canonical_form(given: object) -> None:
    text = canonical_choice(given)
    assert canonical_choice(text) == text


def test_nothing_is_said_of_a_choice() -> None:
    assert canonical_choice(None) == canonical_choice("") == ""


@pytest.mark.parametrize(
    ("given", "parallel", "expected"),
    [
        ("", True, (["f", "g"], True, True)),
        ("auto", False, (["f", "g"], True, False)),
        ("required", True, (["f", "g"], False, True)),
        ("required", False, (["f", "g"], False, False)),
        (choice("g"), True, (["g"], False, False)),
        (allowed("auto", "g"), True, (["g"], True, True)),
        (allowed("required", "f", "g"), False, (["f", "g"], False, False)),
    ],
)
def test_what_an_output_may_be(
    given: object, parallel: bool, expected: tuple[list[str], bool, bool]
) -> None:
    form = form_of(canonical_tools([tool("f"), tool("g")]), canonical_choice(given), parallel)
    found = call_form(parsed(form)[1])
    assert (list(found.functions), found.may_answer, found.many) == expected


def test_without_tools_or_with_none_of_them_an_output_is_free() -> None:
    assert form_of("", "auto", True) == form_of(canonical_tools([tool()]), "none", True) == ""


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("x", "is a text, and not the JSON of tools"),
        ({"type": "function"}, "should be a list of functions"),
        ([5], "tool 0 has type None: only function is supported"),
        ([tool("a"), {"type": "custom", "custom": {"name": "b"}}], "tool 1 has type 'custom'"),
        ([{"type": "function"}], 'tool 0 needs an object under "function"'),
        ([{"type": "function", "function": {}}], "tool 0 has no name: add function.name"),
        ([tool("get weather")], "tool 0 has the name 'get weather': a name has 1 to 64"),
        ([tool("x" * 65)], "a name has 1 to 64 letters"),
        ([tool(7)], "tool 0 has the name 7"),
        ([tool("a"), tool("b"), tool("a")], "two functions with the name 'a': rename one"),
        ([tool("a", parameters=[])], "tool 0 (a) needs a JSON schema"),
        ([tool("a", parameters={"type": "string"})], "(a) has parameters of type 'string'"),
        ([tool("a", description=5)], "(a) has a description that is no text"),
        ([tool("a", strict="yes")], "(a) has a strict that is no bool"),
        ([tool("a", returns={})], "(a) has the field 'returns', which is not supported"),
        ([tool("a") | {"cache": 1}], "tool 0 has the field 'cache', which is not supported"),
        ([tool(f"f{i}") for i in range(200)], f"has 200 tools, more than {MOST_TOOLS}"),
        ([tool("a", description="x" * 600_000)], "more than 524,288"),
        ([tool("a", parameters={"const": 2**70})], "cannot be written as JSON"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_are_no_tools_is_refused_in_words(tools: object, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        canonical_tools(tools)


@pytest.mark.parametrize(
    "given",
    [
        "any", 5, {}, [], {"type": "function"}, {"type": "function", "function": {"name": 5}},
        {"type": "custom", "custom": {"name": "x"}},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_choice_is_refused_in_words(given: object) -> None:
    with pytest.raises(ValueError, match=r'"required"|not the JSON'):
        canonical_choice(given)


@pytest.mark.parametrize(
    "inner",
    [
        {},
        {"mode": "all", "tools": [choice("f")]},
        {"mode": "auto", "tools": []},
        {"mode": "auto", "tools": 5},
    ],
    ids=str,
)
def test_allowed_tools_need_a_mode_and_names(inner: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs a mode"):
        canonical_choice({"type": "allowed_tools", "allowed_tools": inner})


def test_a_choice_names_tools_that_there_are() -> None:
    said = refused(tools=[tool("f"), tool("g")], tool_choice=choice("h"))
    assert "tool_choice names the function 'h', which is not in tools: f, g" in said
    said = refused(tools=[tool("f")], tool_choice=allowed("auto", "f", "z"))
    assert "names the function 'z'" in said


@pytest.mark.parametrize("given", ["required", choice("f")], ids=str)
def test_a_choice_needs_tools(given: object) -> None:
    assert "tool_choice needs tools" in refused(tool_choice=given)


@pytest.mark.parametrize(
    "other",
    [
        {"min_tokens": 3}, {"ignore_eos": True}, {"stop_token_ids": [5]},
        {"response_format": {"type": "json_object"}},
    ],
    ids=str,
)  # fmt: skip
def test_what_contradicts_tools_is_refused_by_name_unless_none_is_called(
    other: dict[str, Any],
) -> None:
    [name] = other
    assert name in refused(tools=[tool()], **other)
    assert spec_of(tools=[tool()], tool_choice="none", **other).sampling.tools
