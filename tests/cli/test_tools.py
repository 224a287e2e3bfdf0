"""Tools of OpenAI's batch files, from the file to the answers as OpenAI's client reads them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import openai
import pyarrow.parquet as pq
import pytest
from jsonschema import Draft202012Validator
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ConfigDict, Field

from support import demo
from support.schemas import tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{% for call in m.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{% endfor %}{{ m.content or '' }}\n{% endfor %}"
)
BLIND = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


class Weather(BaseModel):
    """Look up the weather."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=8)
    unit: Literal["celsius", "fahrenheit"]
    days: int = Field(ge=1, le=9)


WEATHER = openai.pydantic_function_tool(Weather, name="get_weather")
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
PARAMETERS = {
    "get_weather": WEATHER["function"]["parameters"],
    "now": {"type": "object", "maxProperties": 0},
}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def said(*contents: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content} for content in contents]


CALLED = [
    *said("What time is it?"),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", **named("now")}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
]
CALLED[1]["tool_calls"][0]["function"] = {"name": "now", "arguments": "{}"}
BEGIN = tokenizer().encode('{"name"', add_special_tokens=False).ids
BENT = {  # towards this text, token after token: no model here knows tools
    "logit_bias": {str(token): 100 - 10 * BEGIN.index(token) for token in BEGIN},
    "bad_words": [
        [one, two]
        for one in set(BEGIN)
        for two in set(BEGIN)
        if (one, two) not in set(pairwise(BEGIN))
    ],
}
BOTH: dict[str, Any] = {"tools": [WEATHER, NOW]}
ONE: dict[str, Any] = {**BOTH, "parallel_tool_calls": False, "temperature": 0.9, "n": 3}
ASKED: dict[str, dict[str, Any]] = {
    "required": {**ONE, "tool_choice": "required"},
    "several": {**BOTH, "tool_choice": "required", "temperature": 1.0, "n": 4},
    "named": {**ONE, "tool_choice": named("get_weather")},
    "allowed": {
        **ONE,
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [named("now")]},
        },
    },
    "auto, answers": {**BOTH},
    "auto, calls": {**BOTH, **BENT},
    "none": {**BOTH, "tool_choice": "none"},
    "no tools": {"tools": [], "tool_choice": "auto"},
    "goes on": {**ONE, "messages": CALLED, "tool_choice": "required"},
    "cut": {**ONE, "tool_choice": named("get_weather"), "max_tokens": 12},
}
BAD = "get_weather"
MANY = [named(f"f{i}") for i in range(200)]
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no name": (
        {"tools": [{"type": "function", "function": {}}]},
        "bad_parameter",
        "field `tools`: tool 0 has no name: add function.name",
    ),
    "twice": (
        {"tools": [NOW, WEATHER, NOW]},
        "bad_parameter",
        "field `tools`: has two functions with the name 'now': rename one",
    ),
    "unknown": (
        {**BOTH, "tool_choice": named("later")},
        "bad_parameter",
        "tool_choice names the function 'later', which is not in tools: get_weather, now",
    ),
    "without": (
        {"tool_choice": "required"},
        "bad_parameter",
        "tool_choice needs tools: add them, or leave tool_choice out",
    ),
    "schema": (
        {
            "tools": [
                NOW,
                {
                    "type": "function",
                    "function": {
                        "name": BAD,
                        "parameters": {"properties": {"tags": {"uniqueItems": True}}},
                    },
                },
            ]
        },
        "bad_tools",
        "tools of 'get_weather' have parameters at /properties/tags/uniqueItems: Unimplemented "
        'keys: ["uniqueItems"]: simplify them',
    ),
    "text": (
        {"tools": "x"},
        "bad_parameter",
        "field `tools`: is a text, and not the JSON of tools (got 'x')",
    ),
    "many": (
        {"tools": MANY},
        "bad_parameter",
        "field `tools`: has 200 tools, more than 128: leave some out",
    ),
    "custom": (
        {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
        "bad_parameter",
        "field `tools`: tool 0 has type 'custom': only function is supported",
    ),
    "format": (
        {**BOTH, "response_format": {"type": "json_object"}},
        "bad_parameter",
        "response_format and tools contradict one another: leave one out, or set tool_choice to "
        "none",
    ),
    "functions": ({"functions": [{"name": "f"}]}, "unsupported_parameter", "`functions`"),
}


def model_with(template: str, of: Path, folder: Path) -> Path:
    made = shutil.copytree(of, folder)
    path = made / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return made


def batch(path: Path, bodies: dict[str, dict[str, Any]]) -> Path:
    with path.open("w") as file:
        for name, own in bodies.items():
            body = {"model": "m", "messages": said("def area(w):"), "max_tokens": 96, "seed": 3}
            line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps(line | {"body": body | own}) + "\n")
    return path


def lines(path: Path) -> dict[str, Any]:
    return {line["custom_id"]: line for line in map(json.loads, path.read_text().splitlines())}


def extras(model: Any) -> Iterator[str]:
    """Names of fields that OpenAI's client does not know, however deep."""
    if isinstance(model, list):
        for item in model:
            yield from extras(item)
    elif isinstance(model, BaseModel):
        yield from model.model_extra or ()
        for name in type(model).model_fields:
            yield from extras(getattr(model, name))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the answers at depth 0 and at depth 4."""
    from specbatch.jobs.cli.main import main
    from support.databases import migrated

    folder = tmp_path_factory.mktemp("tools")
    migrated(folder / "specbatch-data" / "specbatch.db")
    verifier = model_with(TEMPLATE, demo.VERIFIER, folder / "verifier")
    draft = model_with(TEMPLATE, demo.DRAFT, folder / "draft")
    bodies = ASKED | {name: body for name, (body, _, _) in REFUSED.items()}
    batch(folder / "batch.jsonl", bodies)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for depth in ("0", "4"):
            patch.setattr(
                "sys.argv",
                [
                    *("specbatch", "submit-job", "--local", "--format", "openai"),
                    *("--input", "batch.jsonl", "--output", f"out-{depth}", "--depth", depth),
                    *("--verifier", str(verifier), "--proposer", str(draft), "--name", depth),
                ],
            )
            with pytest.raises(SystemExit) as left:
                main()
            assert left.value.code == 3  # some rows failed
        yield folder


def answer(folder: Path, name: str) -> ChatCompletion:
    body = lines(folder / "out-4" / "output.jsonl")[name]["response"]["body"]
    made = ChatCompletion.model_validate_json(json.dumps(body), strict=True)
    assert list(extras(made)) == []
    return made


def test_all_good_requests_are_answered_and_no_others(done: Path) -> None:
    assert list(lines(done / "out-4" / "output.jsonl")) == list(ASKED)
    assert list(lines(done / "out-4" / "errors.jsonl")) == list(REFUSED)


@pytest.mark.parametrize("name", ["required", "several", "named", "allowed", "goes on"])
def test_calls_are_what_the_client_expects_and_fit_their_tool(done: Path, name: str) -> None:
    made = answer(done, name)
    assert len(made.choices) == ASKED[name]["n"]
    called: list[str] = []
    for choice in made.choices:
        if choice.finish_reason == "length":  # calls may follow one another without end
            assert name == "several"
            assert choice.message.tool_calls is None
            continue
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        calls = choice.message.tool_calls
        assert calls
        assert name == "several" or len(calls) == 1
        for call in calls:
            assert call.type == "function"
            function = call.function
            called.append(function.name)
            Draft202012Validator(PARAMETERS[function.name]).validate(json.loads(function.arguments))
            if function.name == "get_weather":
                Weather.model_validate_json(function.arguments, strict=True)
    assert called
    if name in ("named", "allowed"):
        assert set(called) == {"get_weather" if name == "named" else "now"}


def test_calls_are_a_column_of_the_output(done: Path) -> None:
    rows = pq.read_table(done / "out-4" / "data").to_pylist()
    found = {(row["id"], row["sample_index"]): row["tool_calls"] for row in rows}
    seen = 0
    for name in ASKED:
        for choice in answer(done, name).choices:
            calls = [call.function for call in choice.message.tool_calls or ()]
            expected = [{"name": call.name, "arguments": call.arguments} for call in calls]
            assert found[name, choice.index] == (expected or None)
            seen += len(calls)
    assert seen


def test_a_model_may_call_or_answer_as_it_likes(done: Path) -> None:
    answers = answer(done, "auto, answers").choices[0]
    assert answers.finish_reason in ("stop", "length")
    assert answers.message.content
    assert answers.message.tool_calls is None
    calls = answer(done, "auto, calls").choices[0]
    assert calls.finish_reason == "tool_calls"
    assert [c.function.name for c in calls.message.tool_calls or () if c.type == "function"]


def test_no_tool_is_shown_or_called_where_none_is_wanted(done: Path) -> None:
    without, none = (answer(done, name) for name in ("no tools", "none"))
    assert none.choices == without.choices
    assert none.usage == without.usage


def test_a_call_that_is_cut_ended_by_length_and_its_text_is_kept(done: Path) -> None:
    rows = pq.read_table(done / "out-4" / "data").to_pylist()
    cut = [row for row in rows if row["id"] == "cut"]
    for choice, row in zip(answer(done, "cut").choices, cut, strict=True):
        assert choice.finish_reason == "length"
        assert choice.message.tool_calls is None
        assert choice.message.content == row["text"]
        assert row["error"].endswith("it was cut before its end")


def test_rows_of_the_output_say_that_they_call(done: Path) -> None:
    rows = pq.read_table(done / "out-4" / "data").to_pylist()
    called = [row for row in rows if row["finish_reason"] == "tool_calls"]
    assert {row["id"] for row in called} >= {"required", "named", "allowed", "auto, calls"}
    assert all(row["error"] is None and '{"name": "' in row["text"] for row in called)


def test_ids_of_calls_are_distinct(done: Path) -> None:
    text = (done / "out-4" / "output.jsonl").read_text()
    ids = re.findall(r'"id":"(call_[0-9a-f]{24})"', text)
    assert len(ids) == len(set(ids)) > 10


def test_answers_are_the_same_bytes_at_any_depth(done: Path) -> None:
    """But for what is derived from the job's id, and the time."""
    one, other = (
        re.sub(
            rb'"(id|request_id)":"(batch_req|req|chatcmpl|call)[_-][0-9a-f]{24}"|"created":\d+',
            b"",
            (done / f"out-{depth}" / "output.jsonl").read_bytes(),
        )
        for depth in (0, 4)
    )
    assert one == other
    assert b"tool_calls" in one
    rows = [
        pq.read_table(done / f"out-{depth}" / "data", columns=["id", "token_ids", "text"])
        for depth in (0, 4)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_request_ends_alone_with_one_sentence(done: Path, name: str) -> None:
    _, code, message = REFUSED[name]
    error = lines(done / "out-4" / "errors.jsonl")[name]["error"]
    assert error["code"] == code
    assert error["message"].startswith(message)
    assert "\n" not in error["message"]


def test_calls_pass_an_audit_and_a_replay(
    done: Path, cli: Any, folder: Path, monkeypatch: Any
) -> None:
    assert folder.is_dir()
    monkeypatch.chdir(done)
    jobs = {job["name"]: job["job"] for job in cli("jobs", "--json").json}
    audited = cli("audit", jobs["4"], "--sample", "100%")
    assert audited.code == 0, audited.out
    assert cli("replay", jobs["4"] + "/0").code == 0


def test_a_template_that_does_not_show_tools_refuses_them(cli: Any, folder: Path) -> None:
    model = model_with(BLIND, demo.VERIFIER, folder / "blind")
    asked = {
        "tools": {**BOTH},
        "calls": {"messages": CALLED},
        "none": {**BOTH, "tool_choice": "none"},
    }
    batch(folder / "batch.jsonl", asked)
    flags = ["--format", "openai", "--input", "batch.jsonl", "--output", "out", "--max-tokens", 4]
    assert cli("submit-job", "--local", *flags, "--verifier", model).code == 3
    errors = lines(folder / "out" / "errors.jsonl")
    assert list(lines(folder / "out" / "output.jsonl")) == ["none"]
    for name, what in (("tools", "tools"), ("calls", "the tool calls of messages")):
        error = errors[name]["error"]
        assert error["code"] == "no_tool_template"
        assert f"does not show it {what}: use a model whose template does" in error["message"]


def test_a_job_has_tools_for_all_of_its_rows(cli: Any, folder: Path) -> None:
    """Its prompts may be plain text, which is as it is."""
    (folder / "tools.json").write_text(json.dumps([WEATHER]))
    flags = ["--tools", "tools.json", "--tool-choice", "required", "--no-parallel-tool-calls"]
    more = ["--input", "prompts.parquet", "--output", "out", "--max-tokens", 96]
    assert cli("submit-job", "--local", *flags, *more, "--verifier", demo.VERIFIER).code == 0
    rows = pq.read_table(folder / "out" / "data").to_pylist()
    assert [row["finish_reason"] for row in rows] == ["tool_calls"] * 12
    assert all("get_weather" in row["text"] for row in rows)
