"""Calls of tools: what their grammar allows is what is read, judged and nothing else."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from ingest.test_grammars import large_tokenizer
from jsonschema import Draft202012Validator
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from specbatch.pipeline.inputs.grammars import CompiledGrammar, GrammarError, Grammars
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.outputs.tool_calls import Calling, ToolCall, calls_in
from specbatch.pipeline.outputs.validation import problem_of
from specbatch.schemas.tools import canonical_choice, canonical_tools, form_of
from support.schemas import END, TOKENIZER, VOCAB, closing_ids, text_of, tokenizer, walk

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "minItems": 1, "maxItems": 2},
        "unit": {"enum": ["celsius", "fahrenheit", None]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer", "minimum": 1, "maximum": 31}},
}
PARAMETERS: dict[str, Any] = {
    "get_weather": WEATHER,
    "get_wind": {"type": "object", "properties": {"at": {"$ref": "#"}}, "maxProperties": 1}
    | {"additionalProperties": False},
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = canonical_tools(
    [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in PARAMETERS.items()
    ]
)
NOW = '{"name": "now", "arguments": {}}'
WIND = '{"name": "get_wind", "arguments": {"at": {"at": {}}}}'
TAGGED = "<tool_call>\n{}\n</tool_call>"


def form(choice: Any = "auto", parallel: bool = True) -> str:
    return form_of(TOOLS, canonical_choice(choice), parallel)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER.read_text(), VOCAB, [END])


def takes(grammar: CompiledGrammar, text: str) -> bool:
    """Whether a text may be an output, from its beginning to its end."""
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    matcher = grammar.matcher()
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


CALLS = [
    (NOW, None, ["now"]),
    (f"[{NOW}]", None, ["now"]),
    (f"[{NOW}, {WIND}]", None, ["now", "get_wind"]),
    (TAGGED.format(NOW), None, ["now"]),
    (f"{TAGGED.format(WIND)}\n{TAGGED.format(NOW)}", None, ["get_wind", "now"]),
]
ANSWERS = ["", "Hello.", "x [{", '{"nam', '{"a": 1}', "[1, 2]", "a < b <tool", '"name"', "{} {"]
NEITHER = [
    '{"name": "now"}', '{"name": "other", "arguments": {}}', '{"name": "now", "arguments": []}',
    '{"name": "now", "arguments": {"a": 1}}', f"{NOW} and more", f"[{NOW}", f"[{NOW},{NOW}]",
    f"<tool_call>{NOW}</tool_call>", f"{TAGGED.format(NOW)} so", "<tool_call>\n", '{"name"',
    '[{"name"', "some <tool_call> text",
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "names"), CALLS)
def test_calls_are_allowed_read_and_judged(
    grammars: Grammars, text: str, content: str | None, names: list[str]
) -> None:
    for choice in ("auto", "required"):
        assert takes(grammars.of(form(choice)), text)
        assert problem_of(form(choice), text, ended=True) is None
        said = problem_of(form(choice), text, ended=False)
        assert said is not None
        assert said.endswith("it was cut before its end")
    found = calls_in(text)
    assert found is not None
    assert (found.content, [call.name for call in found.calls]) == (content, names)
    assert all(type(json.loads(call.arguments)) is dict for call in found.calls)


def test_an_answer_may_lead_to_calls(grammars: Grammars) -> None:
    text = f"I look it up.\n\n{TAGGED.format(NOW)}"
    assert takes(grammars.of(form()), text)
    assert not takes(grammars.of(form("required")), text)
    assert calls_in(text) == Calling("I look it up.", (ToolCall("now", "{}"),))
    # A tokenizer may begin a text with a space, which decoding takes away again.
    assert takes(grammars.of(form()), f" {NOW}")
    assert calls_in(f" {NOW}") == Calling(None, (ToolCall("now", "{}"),))


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_is_allowed_where_nothing_else_is_required(grammars: Grammars, text: str) -> None:
    assert takes(grammars.of(form()), text)
    assert calls_in(text) is None
    assert problem_of(form(), text, ended=True) is None
    assert problem_of(form(), text, ended=False) is None
    assert not takes(grammars.of(form("required")), text)
    assert problem_of(form("required"), text, ended=True) is not None


@pytest.mark.parametrize("text", NEITHER)
def test_what_begins_as_a_call_is_one(grammars: Grammars, text: str) -> None:
    for choice in ("auto", "required"):
        assert not takes(grammars.of(form(choice)), text)
        assert problem_of(form(choice), text, ended=True) is not None


def test_one_call_where_only_one_is_asked_for(grammars: Grammars) -> None:
    named = {"type": "function", "function": {"name": "get_wind"}}
    for choice, parallel, fits in (
        ("required", False, NOW),
        ("auto", False, NOW),
        (named, True, WIND),
    ):
        grammar = grammars.of(form(choice, parallel))
        assert takes(grammar, fits)
        assert takes(grammar, TAGGED.format(fits))
        for several in (f"[{fits}]", f"[{fits}, {fits}]", "\n".join([TAGGED.format(fits)] * 2)):
            assert not takes(grammar, several)
        assert problem_of(form(choice, parallel), f"[{fits}, {fits}]", ended=True) is not None
    assert not takes(grammars.of(form(named)), NOW)
    assert problem_of(form(named), NOW, ended=True) is not None


def test_a_name_is_forced_as_soon_as_it_is_certain(grammars: Grammars) -> None:
    state = grammars.of(form("required", parallel=False)).begin()
    for token in tokenizer().encode('{"name": "n', add_special_tokens=False).ids:
        state.append(token)
    assert text_of(list(state.forced())).startswith('ow", "arguments": {}}')


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_allowed_has_calls_with_right_arguments(grammars: Grammars, seed: int) -> None:
    """Random outputs, judged by jsonschema without what leaves patterns out."""
    asked = form("required")
    grammar = grammars.of(asked)
    walked = walk(grammar, random.Random(seed), 400, closing_ids())
    text = text_of(walked.token_ids)
    if not walked.finished:
        assert problem_of(asked, text, ended=False) is not None
        return
    assert problem_of(asked, text, ended=True) is None
    found = calls_in(text)
    assert found is not None
    for call in found.calls:
        Draft202012Validator(PARAMETERS[call.name]).validate(json.loads(call.arguments))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"uniqueItems": True}}}, ["bad", "/properties/a/uniqueItems"]),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, ["bad", "/properties/a"]),
        ({"properties": {"a": False}, "required": ["a"]}, ["bad"]),
        ({"properties": {f"p{i}": {} for i in range(1001)}}, ["bad", "1,000 properties"]),
        ({"x-guidance": 5}, ["x-guidance is no object"]),
    ],
    ids=["keyword", "pattern", "nothing", "many", "guidance"],
)
def test_parameters_that_cannot_be_compiled_are_named(
    grammars: Grammars, schema: dict[str, Any], words: list[str]
) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in [("good", WEATHER), ("bad", schema)]
    ]
    with pytest.raises(GrammarError) as raised:
        grammars.of(form_of(canonical_tools(tools), "auto", True))
    said = str(raised.value)
    assert "\n" not in said
    assert "good" not in said
    assert all(word in said for word in words), said


def test_all_tools_together_have_so_many_properties_at_most(grammars: Grammars) -> None:
    schema = {"properties": {f"p{i}": {} for i in range(500)}}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(9)
    ]
    with pytest.raises(GrammarError, match="4,000 in all"):
        grammars.of(form_of(canonical_tools(tools), "auto", True))


def test_the_most_tools_are_compiled(grammars: Grammars) -> None:
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": WEATHER}}
        for i in range(128)
    ]
    grammar = grammars.of(form_of(canonical_tools(tools), "required", True))
    text = '{"name": "f127", "arguments": {"city": "Bern", "days": [3]}}'
    assert takes(grammar, text)


# --- tags and other tokens that are not read as what they show ------------------------------------
SHOWN = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


@pytest.fixture(scope="module")
def trained_in_calls() -> Tokenizer:
    """As tokenizers of Qwen models are: tags are tokens, and texts show them."""
    made = Tokenizer.from_str(large_tokenizer())
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in SHOWN])
    return made


@pytest.fixture(scope="module")
def calling(trained_in_calls: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("calling")
    PreTrainedTokenizerFast(tokenizer_object=trained_in_calls, eos_token="<|end|>").save_pretrained(
        folder
    )
    return TextTokenizer.load(str(folder))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (TAGGED.format(NOW), None),
        (f"{TAGGED.format(NOW)}\n{TAGGED.format(NOW)}", None),
        (f"<think>a < b\n</think>\n\n{TAGGED.format(NOW)}", "<think>a < b\n</think>"),
        (f"Well.\n{TAGGED.format(NOW)}", "Well."),
        (NOW, None),
        ("<think>a</think>No calls.", ""),
        ("Hello.", ""),
    ],
)
def test_tags_and_thoughts_may_be_tokens(
    calling: TextTokenizer, text: str, content: str | None
) -> None:
    [ids] = calling.encode_batch([text], special=False)
    matcher = calling.grammar(form(), 8300).matcher()
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()
    assert calling.decode(ids) == text
    assert problem_of(form(), text, ended=True) is None
    found = calls_in(text)
    if content == "":
        assert found is None
    else:
        assert found is not None
        assert found.content == content


def test_a_tag_that_is_a_token_is_a_call_as_well(calling: TextTokenizer) -> None:
    grammar = calling.grammar(form(), 8300)
    tag, thought = calling.encode_batch(["<tool_call>", "<think>"], special=False)
    for begin in (tag, [*thought, *tag]):
        state = grammar.begin()
        for token in begin:
            state.append(token)
        assert calling.decode(list(state.forced())).startswith('\n{"name": "')
    spelt = calling.encode_batch(["<tool_", "call>"], special=False)
    matcher = grammar.matcher()
    assert matcher.try_consume_tokens(spelt[0] + spelt[1]) < len(spelt[0] + spelt[1])
