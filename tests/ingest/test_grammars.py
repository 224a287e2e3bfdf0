"""Forms of outputs: what is compiled, which tokens may follow, and what is refused, in one line."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from specbatch.pipeline.inputs import grammars
from specbatch.pipeline.inputs.grammars import CompiledGrammar, GrammarError, Grammars
from specbatch.schemas.errors import EngineError
from specbatch.schemas.response_format import canonical
from support.schemas import (
    END,
    TOKENIZER,
    VOCAB,
    allowed_ids,
    cases,
    closing_ids,
    problem_of,
    text_of,
    tokenizer,
    walk,
)

ALL = -1  # a row of a mask before anything is put there
CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "get_weather_forecast"},
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "city", "unit", "days"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "call": {"type": "json_schema", "schema": CALL},
    "object": {"type": "json_object"},
    "anything": {"type": "json_schema", "schema": True},
    "regex": {"type": "regex", "regex": r"(ab|cd)+x{2,5}[0-9]*"},
    "choice": {"type": "choice", "choice": ["yes", "yes, but", "no", 'a "b"\n\x7f\x00 é \\d /x/']},
    "lark": {"type": "lark", "lark": 'start: "[" NUMBER ("," NUMBER)* "]"\nNUMBER: /[0-9]+/'},
}


@cache
def of_demo() -> Grammars:
    return Grammars(TOKENIZER.read_text(), VOCAB, [END])


@cache
def large_tokenizer() -> str:
    """A byte-level BPE of 8,192 tokens and two that end a text, made of the repository's text."""
    root = Path(__file__).parents[2]
    texts = [p.read_text() for p in sorted((root / "pipeline").rglob("*.py"))[:150]]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=8192,
            special_tokens=["<|end|>", "<|turn|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return str(made.to_str())


@cache
def of_large() -> Grammars:
    """With more logits than tokens, as models have them, and two ends."""
    return Grammars(large_tokenizer(), 8300, [0, 1])


def compiled(form: dict[str, Any], made: Grammars | None = None) -> CompiledGrammar:
    return (made or of_demo()).of(canonical(form))


def of_schema(schema: Any) -> CompiledGrammar:
    return compiled({"type": "json_schema", "schema": schema})


def refused(form: dict[str, Any]) -> str:
    with pytest.raises(GrammarError) as raised:
        compiled(form)
    said = str(raised.value)
    assert "\n" not in said
    assert len(said) < 500
    return said


def refused_schema(schema: Any) -> str:
    return refused({"type": "json_schema", "schema": schema})


def masks(
    state: Any, draft: list[int], rows: int, first: int = 0, vocab: int = VOCAB
) -> np.ndarray[Any, Any]:
    allowed = np.full((rows, -(-vocab // 32)), ALL, dtype=np.int32)
    state.masks(allowed, draft, first)
    return allowed


def allowed_by(state: Any, vocab: int = VOCAB) -> list[int]:
    return [int(token) for token in allowed_ids(masks(state, [], 1, vocab=vocab)[0])]


def some_output(grammar: CompiledGrammar, seed: int, most: int = 60) -> list[int]:
    return list(walk(grammar, random.Random(seed), most, closing_ids()).token_ids)


def _as_written(state: Any, fits: list[int]) -> list[int]:
    """Of the tokens that fit, those that a mask has: of a text that is forced, only the first one
    of how the tokenizer writes it."""
    forced = state.forced()[:1]
    assert set(forced) <= {*fits, 0}
    return [t for t in forced if t in fits] or fits


# --- masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_has_the_tokens_that_may_follow_and_no_others(form: str) -> None:
    grammar = compiled(FORMS[form])
    naive, state = grammar.matcher(), grammar.begin()
    for token in some_output(grammar, seed=1, most=24):
        expected = [t for t in range(VOCAB) if t != END and naive.validate_tokens([t])]
        if naive.is_accepting():
            expected = [END, *expected]
        assert allowed_by(state) == _as_written(state, expected)
        if token == END:
            return
        state.append(token)
        assert naive.consume_token(token)


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_of_a_larger_vocabulary_with_two_ends(form: str) -> None:
    grammar = compiled(FORMS[form], of_large())
    naive, state, chance = grammar.matcher(), grammar.begin(), random.Random(3)
    for _ in range(8):
        allowed = allowed_by(state, 8300)
        expected = [t for t in range(2, 8192) if naive.validate_tokens([t])]
        assert [t for t in allowed if t > 1] == _as_written(state, expected), (
            "no token beyond the tokenizer's"
        )
        assert [t for t in allowed if t < 2] == ([0, 1] if naive.is_accepting() else [])
        if not expected:
            return
        token = chance.choice([t for t in allowed if t > 1])
        state.append(token)
        naive.consume_token(token)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(FORMS)), st.integers(0, 10**6), st.integers(0, 6), st.integers(0, 9))
def test_rows_behind_a_draft_are_the_rows_one_after_the_other(
    form: str, seed: int, first: int, length: int
) -> None:
    grammar = compiled(FORMS[form])
    output = some_output(grammar, seed)
    at = random.Random(seed).randrange(len(output))
    drafted = [t for t in output[at : at + first + length] if t != END]
    first = min(first, len(drafted))
    state, alone = grammar.begin(), grammar.begin()
    for token in output[:at]:
        state.append(token)
        alone.append(token)
    at_once = masks(state, drafted, len(drafted) - first + 1, first)
    for i in range(len(drafted) + 1):
        row = masks(alone, [], 1)[0]
        if i >= first:
            assert np.array_equal(at_once[i - first], row)
        if i < len(drafted):
            alone.append(drafted[i])


def test_rows_behind_a_draft_token_that_does_not_fit_stay_as_they_are() -> None:
    grammar = compiled(FORMS["call"])
    fits = list(grammar.begin().forced())[:3]
    wrong = next(t for t in range(1, VOCAB) if t not in allowed_by(grammar.begin()))
    rows = masks(grammar.begin(), [*fits, wrong, fits[0]], 6)
    assert (rows[:4] != ALL).any(axis=1).all()
    assert (rows[4:] == ALL).all()
    assert (masks(grammar.begin(), [wrong, *fits], 3, first=1) == ALL).all()


def test_nothing_follows_an_end_within_a_draft() -> None:
    grammar = compiled({"type": "regex", "regex": "ab*"})
    a, b = (tokenizer().token_to_id(text) for text in "ab")
    rows = masks(grammar.begin(), [a, END, b], 4)
    assert END in allowed_ids(rows[1])
    assert (rows[2:] == ALL).all()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(FORMS)), st.integers(0, 10**6), st.lists(st.integers(0, VOCAB - 1)))
def test_looking_changes_nothing(form: str, seed: int, draft: list[int]) -> None:
    """Whatever is drafted, right or wrong, and however often it is asked what must follow."""
    grammar = compiled(FORMS[form])
    looked, alone = grammar.begin(), grammar.begin()
    for token in some_output(grammar, seed, most=20):
        for first in {0, min(2, len(draft))}:
            masks(looked, draft, len(draft) - first + 1, first)
        assert looked.forced() == looked.forced()
        assert np.array_equal(masks(looked, [], 1), masks(alone, [], 1))
        looked.append(token)
        alone.append(token)


# --- what is forced -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_forced_tokens_are_allowed_one_by_one(form: str) -> None:
    grammar = compiled(FORMS[form])
    for seed in range(4):
        state = grammar.begin()
        for token in some_output(grammar, seed):
            follows = grammar.begin()
            for before in state._tokens:
                follows.append(before)
            for forced in state.forced():
                assert forced in allowed_by(follows)
                follows.append(forced)
            if token == END:
                break
            state.append(token)


@cache
def of_words() -> Grammars:
    """With a tokenizer that splits contractions, as Qwen's does: what follows a forced token may be
    written otherwise once it was decided."""
    made = Tokenizer.from_str(large_tokenizer())
    split = Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|\p{L}+|[^\s\p{L}]+|\s+")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return Grammars(made.to_str(), 8300, [0, 1])


def _check_masks(made: Grammars, form: str, seed: int) -> None:
    """Masks along an output do not depend on whether somebody asked what is forced."""
    grammar, chance = made.of(form), random.Random(seed)
    knows, does_not = grammar.begin(), grammar.begin()
    for _ in range(40):
        forced, allowed = list(knows.forced()), allowed_by(does_not, made.vocab_size)
        if not allowed:
            break
        token = forced[0] if forced[:1] == allowed else chance.choice(allowed)
        for draft in (forced, forced[:1], [*forced[:2], token], [token]):
            rows = [
                masks(s, draft, len(draft) + 1, vocab=made.vocab_size) for s in (knows, does_not)
            ]
            assert np.array_equal(*rows)
        if token in grammar.end_ids:
            break
        knows.append(token)
        does_not.append(token)


@pytest.mark.parametrize("made", [of_demo, of_large, of_words])
def test_masks_do_not_depend_on_what_was_asked(made: Callable[[], Grammars]) -> None:
    choice = {"type": "choice", "choice": ["text''textt", "(((('texts((idrere \""]}
    forms = [canonical(form) for form in (*FORMS.values(), choice)]
    forms += [case.response_format for case in cases(40, seed=3)]
    for seed, form in enumerate(forms):
        with suppress(GrammarError):
            made().of(form)
            _check_masks(made(), form, seed)


def test_what_is_forced_is_written_as_the_tokenizer_writes_it() -> None:
    forced = list(compiled(FORMS["call"]).begin().forced())
    assert text_of(forced).startswith('{"name": "get_weather_forecast", "city":')
    assert len(forced) < len(text_of(forced)) / 2


def test_the_end_is_forced_once_nothing_else_may_follow() -> None:
    state = compiled({"type": "choice", "choice": ["yes"]}).begin()
    forced = state.forced()
    assert forced[-1] == END
    for token in forced[:-1]:
        state.append(token)
    assert state.forced() == [END]
    assert allowed_by(state) == [END]
    state.append(END)


def test_a_long_forced_text_is_drafted_in_parts() -> None:
    text = " ".join(f"word{i}" for i in range(400))
    state = of_schema({"const": text}).begin()
    out: list[int] = []
    while (forced := state.forced()) != [END]:
        assert 0 < len(forced) <= 64
        for token in forced:
            if token != END:
                state.append(token)
                out.append(token)
    assert json.loads(text_of(out)) == text


def test_a_text_that_is_forced_without_an_end_costs_drafts_only() -> None:
    """A lexer that gave up is made anew, also under the feet of another output."""
    grammar = compiled({"type": "regex", "regex": "x?a{1000000}"})
    state, other = grammar.begin(), grammar.begin()
    a = tokenizer().token_to_id("a")
    state.append(a)
    assert set(text_of(state.forced())) == {"a"}
    for one in (state, other, grammar.begin()):
        assert a in allowed_by(one)
        one.append(a)


@pytest.mark.parametrize(
    ("form", "text", "fits"),
    [
        ("date", "2024-02-29", True),
        ("date", "0001-01-31", True),
        ("date", "0000-12-22", False),
        ("date", "2024-02-30", False),
        ("date", "2023-02-29", False),
        ("date", "1900-02-29", False),
        ("date", "2000-02-29", True),
        ("date", "2023-04-31", False),
        ("time", "23:59:59Z", True),
        ("time", "11:01:60Z", False),
        ("date-time", "2024-02-29T23:59:59.5+01:00", True),
        ("date-time", "0000-02-03T23:12:02Z", False),
        ("date-time", "2024-02-03T23:12:60Z", False),
    ],
)
@pytest.mark.parametrize("more", [{}, {"pattern": "^[0-2]"}], ids=["alone", "and a pattern"])
def test_dates_and_times_are_such_that_parsers_read(
    form: str, text: str, fits: bool, more: dict[str, Any]
) -> None:
    matcher = of_schema({"type": "string", "format": form} | more).matcher()
    ids = tokenizer().encode(json.dumps(text)).ids
    assert (matcher.validate_tokens(ids) == len(ids)) is fits


# --- ends -----------------------------------------------------------------------------------------


def test_ends_are_allowed_where_the_output_may_end() -> None:
    state = compiled({"type": "regex", "regex": "a+"}).begin()
    assert END not in allowed_by(state)
    state.append(tokenizer().token_to_id("a"))
    assert END in allowed_by(state)
    state.append(END)


@pytest.mark.parametrize("end", [0, 1])
def test_each_of_several_ends_ends_an_output(end: int) -> None:
    state = compiled({"type": "choice", "choice": ["b"]}, of_large()).begin()
    (token, forced_end) = state.forced()
    assert forced_end == 0
    state.append(token)
    assert allowed_by(state, 8300) == [0, 1]
    state.append(end)


def test_a_token_that_does_not_fit_is_an_error() -> None:
    state = compiled(FORMS["call"]).begin()
    with pytest.raises(EngineError, match=r"^its response format cannot be followed any further"):
        state.append(END)


# --- what is kept ---------------------------------------------------------------------------------


def test_a_form_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Grammars(TOKENIZER.read_text(), VOCAB, [END])
    form = canonical(FORMS["call"])
    first = made.of(form)
    assert made.of(form) is first
    monkeypatch.setattr(grammars, "_MOST_KEPT", 2)
    made.of(canonical(FORMS["regex"]))
    assert made.of(form) is first, "it was used last"
    made.of(canonical(FORMS["choice"]))
    assert made.of(form) is first
    made.of(canonical(FORMS["regex"]))
    made.of(canonical(FORMS["lark"]))
    assert made.of(form) is not first


def test_many_threads_may_compile_and_use_the_same_forms() -> None:
    made = Grammars(TOKENIZER.read_text(), VOCAB, [END])
    expected = {name: some_output(compiled(form), 5) for name, form in FORMS.items()}
    found: list[tuple[str, list[int]]] = []
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            names = random.Random(seed).sample(sorted(FORMS), len(FORMS))
            found.extend((name, some_output(compiled(FORMS[name], made), 5)) for name in names)
        except BaseException as error:  # told below, whatever it is
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert len(found) == 8 * len(FORMS)
    assert all(output == expected[name] for name, output in found)


# --- what is refused ------------------------------------------------------------------------------

BAD = {"type": "string", "not": {"const": "a"}}
AT = {
    "/properties/a/not": {"type": "object", "properties": {"a": BAD}},
    "/items/not": {"type": "array", "items": BAD},
    "/prefixItems/1/not": {"type": "array", "prefixItems": [{}, BAD]},
    "/anyOf/2/not": {"anyOf": [{}, {"type": "null"}, BAD]},
    "/allOf/0/not": {"allOf": [BAD]},
    "/patternProperties/^x/not": {"type": "object", "patternProperties": {"^x": BAD}},
    "/additionalProperties/not": {"type": "object", "additionalProperties": BAD},
    "/$defs/b/not": {"$ref": "#/$defs/b", "$defs": {"a": {}, "b": BAD}},
    "/properties/a~1b~0/items/not": {"properties": {"a/b~": {"items": BAD}}},
    "/properties/c/not": {
        # What is fine has references to what is fine.
        "properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "null"}, "c": BAD}
    },
    "/properties/l/items/anyOf/1/properties/deep/not": {
        "type": "object",
        "properties": {
            "k": {"$ref": "#/$defs/k"},
            "l": {"items": {"anyOf": [{}, {"type": "object", "properties": {"deep": BAD}}]}},
        },
        "$defs": {"k": {"type": "array", "items": {"$ref": "#/$defs/k"}}},
    },
}


@pytest.mark.parametrize("path", AT)
def test_the_path_of_a_fault_is_told(path: str) -> None:
    assert refused_schema(AT[path]) == f'at {path}: Unimplemented keys: ["not"]'


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (False, "nothing fits it"),
        ({"type": "float"}, "at /type: Invalid type: float"),
        ({"type": "string", "format": "no-such"}, "at /format: Unknown format: no-such"),
        ({"enum": []}, "at /enum: Unsatisfiable schema: anyOf is empty"),
        ({"multipleOf": 0, "type": "integer"}, "at /multipleOf: invalid multiple of"),
        (
            {"items": {"pattern": "(a"}},
            "at /items/pattern: the pattern (a cannot be read: unclosed group",
        ),
        (
            {"type": "string", "pattern": "^a$", "minLength": 2},
            "at /pattern: no text fits its pattern, format and length",
        ),
        ({"$ref": "#"}, "at /$ref: nothing fits it"),
        ({"format": "date", "pattern": "x", "allOf": 5}, "at /allOf: allOf must be an array"),
        (
            {"$ref": "https://example.org/s"},
            "its $ref leads out of the schema, and nothing is fetched",
        ),
        (
            {"required": ["a"], "properties": {"a": {"$ref": "#"}}, "type": "object"},
            "at /properties/a/$ref: what it forces has no end, or is too long",
        ),
    ],
)
def test_what_is_wrong_with_a_schema_is_said_in_one_sentence(schema: Any, said: str) -> None:
    assert refused_schema(schema) == said


@pytest.mark.parametrize(
    ("regex", "said"),
    [
        ("(a", "the pattern (a cannot be read: unclosed group"),
        ("[z-a]", "cannot be read: invalid character class range, the start must be <= the end"),
        ("(?=a)b", "cannot be read: look-around, including look-ahead and look-behind, is not"),
        (r"\1(a)", "cannot be read: backreferences are not supported"),
        (r"\p{Foo}", "cannot be read: Unicode property not found"),
        ("a" * 500 + "(", "cannot be read: unclosed group"),
        (r"[^\s\S]", "nothing fits it"),
        ("a{1000000}", "what it forces has no end, or is too long"),
    ],
)
def test_what_is_wrong_with_a_regex_is_said_in_one_sentence(regex: str, said: str) -> None:
    assert said in refused({"type": "regex", "regex": regex})


@pytest.mark.parametrize(
    ("lark", "said"),
    [
        ("start: foo", 'line 1, column 8: unknown name: "foo"'),
        ('foo: "a"', "no start rule found"),
        ('start: "a', "line 1, column 10: lexer error"),
        ('start: "b"\n  | x ]', "line 2, column 7: expecting rule, token or statement"),
        ("start: /(a/", "the pattern (a cannot be read: unclosed group"),
        ("start: start", "nothing fits it"),
        ('start: "a" start', "what it forces has no end, or is too long"),
        ('start: %json {"multipleOf": 0}', "failed to compile JSON schema: invalid multiple of"),
    ],
)
def test_what_is_wrong_with_a_lark_grammar_is_said_in_one_sentence(lark: str, said: str) -> None:
    assert said in refused({"type": "lark", "lark": lark})


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["regex", "lark"]), st.text(st.characters(codec="utf-8"), min_size=1))
def test_any_text_is_compiled_or_refused(kind: str, text: str) -> None:
    form = {"type": kind, kind: text}
    try:
        grammar = compiled(form)
    except GrammarError:
        assert refused(form)
    else:
        assert allowed_by(grammar.begin())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=4))
def test_any_choice_of_texts_can_be_written(choice: list[str]) -> None:
    grammar = compiled({"type": "choice", "choice": choice})
    ids = tokenizer().encode(choice[-1]).ids
    state = grammar.begin()
    for token in ids:
        state.append(token)
    assert END in allowed_by(state)


# --- hostile forms --------------------------------------------------------------------------------


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def laughs(depth: int, key: str) -> dict[str, Any]:
    """Each definition has the next one twice."""
    defs: dict[str, Any] = {
        f"a{i}": {key: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(depth)
    }
    return {"$ref": "#/$defs/a0", "$defs": defs | {f"a{depth}": {"type": "string"}}}


def many(count: int, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"k{i}": {"type": "string"} for i in range(count)},
    } | more


HOSTILE: dict[str, dict[str, Any]] = {
    "enum": {"enum": [f"value {i}" for i in range(14_000)]},
    "properties": many(900, additionalProperties=False),
    "too many properties": many(9_000),
    "too many in all": {"properties": {f"o{i}": many(500) for i in range(9)}},
    "all required": many(900, required=[f"k{i}" for i in range(900)]),
    "objects to choose from": {
        "anyOf": [{"properties": {"a": {"const": i}}} for i in range(2_500)]
    },
    "what all must be": {"allOf": [{"properties": {f"p{i}": {}}} for i in range(3_000)]},
    "definitions that double": laughs(40, "anyOf"),
    "definitions that multiply": laughs(40, "allOf"),
    "a fault among many": many(900, **{"$defs": {f"d{i}": many(20) for i in range(60)}})
    | {"not": {"type": "string"}},
    "a long text": {"type": "string", "minLength": 10**6},
    "a long list": {"type": "array", "minItems": 10**6, "items": {"type": "integer"}},
    "a pattern of repetitions": {"type": "string", "pattern": "^(.*a){30}.{200}$"},
    "repetitions of repetitions": {"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"},
    "patterns that cross": {
        "allOf": [{"pattern": f"^.*{c}.{{{n}}}$"} for n, c in enumerate("abcdefgh", 9)],
        "type": "string",
    },
    "a large multiple": {"type": "integer", "multipleOf": 999_999_937},
    "properties by patterns": {
        "type": "object",
        "patternProperties": {f"^{c}.*x": {"type": "integer"} for c in "abcdefghijklmnop"},
    },
    "itself": {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]},
    "many objects": {"type": "object", "minProperties": 500},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_takes_little_time_and_memory(name: str) -> None:
    form = canonical({"type": "json_schema", "schema": HOSTILE[name]})
    before, begun = _resident_mb(), time.process_time()
    try:
        state = of_demo().of(form).begin()
        for _ in range(10):
            allowed = [t for t in allowed_by(state) if t != END]
            if not allowed:
                break
            state.append(allowed[len(allowed) // 2])
            state.forced()
    except GrammarError:
        refused(json.loads(form))
    except EngineError:
        pass  # one row fails
    assert time.process_time() - begun < 8.0  # seconds; a machine may be slow
    assert _resident_mb() - before < 512


def test_nesting_is_bounded() -> None:
    compiled({"type": "json_schema", "schema": json.loads(nested(100))})
    said = refused({"type": "json_schema", "schema": json.loads(nested(200))})
    assert said.endswith(": it is nested too deeply")
    with pytest.raises(ValueError, match="cannot be written as JSON: recursion limit reached"):
        canonical({"type": "json_schema", "schema": json.loads(nested(300))})
    with pytest.raises(ValueError, match="is not JSON"):
        canonical('{"type": "json_schema", "schema": ' + nested(2_000) + "}")


def test_a_number_of_more_than_64_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="integer exceeds 64-bit range"):
        canonical({"type": "json_schema", "schema": {"maximum": 10**30}})


def test_a_form_is_not_larger_than_256_kib() -> None:
    with pytest.raises(ValueError, match=r"has 300,\d\d\d bytes, more than 262,144"):
        canonical({"type": "regex", "regex": "a" * 300_000})


def test_other_threads_go_on_while_a_form_is_compiled() -> None:
    """A large form takes a while, and it is compiled without the interpreter's lock."""
    form = canonical({"type": "json_schema", "schema": many(990)})
    made, done = Grammars(TOKENIZER.read_text(), VOCAB, [END]), threading.Event()

    def compile_it() -> None:
        made.of(form)
        done.set()

    thread = threading.Thread(target=compile_it)
    thread.start()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 3


def _resident_mb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20


# --- many schemas ---------------------------------------------------------------------------------

FINISH = 0.95  # of walks, in the tokens that a schema should need


def _told(about: str, said: str) -> bool:
    """Whether the message has the keyword's name."""
    return bool(re.search(rf"(?<![A-Za-z]){re.escape(about)}(?![A-Za-z])", said))


def _walk_all(count: int, seed: int) -> Iterator[str]:
    """What is wrong with the outputs of so many schemas; at the end too few that finished."""
    refusals: Counter[str] = Counter()
    walks = finished = 0
    for i, case in enumerate(cases(count, seed)):
        try:
            grammar = of_demo().of(case.response_format)
        except GrammarError as error:
            about = "oneOf" if case.about == "function call" else case.about
            refusals[about] += 1
            if not _told(about, str(error)):
                yield f"{about} is refused without its name: {error}: {json.dumps(case.schema)}"
            continue
        made = walk(grammar, random.Random(i), case.most_tokens, closing_ids())
        walks += 1
        finished += made.finished
        text = text_of(made.token_ids)
        if made.finished and (problem := problem_of(text, case.schema)):
            yield f"{problem}: {text} of {json.dumps(case.schema)}"
    if finished < FINISH * walks:
        yield f"{finished} of {walks} walks finished"
    if sum(refusals.values()) > 0.2 * count:
        yield f"refused: {refusals}"


def test_outputs_of_a_hundred_and_fifty_schemas_are_valid() -> None:
    assert list(_walk_all(150, seed=11)) == []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_outputs_of_two_thousand_schemas_are_valid(seed: int) -> None:
    assert list(_walk_all(2000, seed)) == []
