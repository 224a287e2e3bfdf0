"""Seeded JSON schemas, and random walks through what their grammars allow.

Two kinds: schemas of function calls, as OpenAI's `json_schema` form has them, and forms of every
keyword of draft 2020-12, alone and inside others.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jsonschema.exceptions import ValidationError
from jsonschema.validators import Draft202012Validator, extend
from tokenizers import Tokenizer

from specbatch.pipeline.inputs.grammars import CompiledGrammar
from specbatch.schemas.response_format import canonical

TOKENIZER = Path(__file__).parents[2] / "jobs/demo/models/verifier/tokenizer.json"
VOCAB, END = 2048, 0
FREE = 96  # tokens that a text or a list without a bound is given
_S, _I, _N = {"type": "string"}, {"type": "integer"}, {"type": "number"}

# Forms of every keyword. What is refused is refused by its name.
KEYWORDS: dict[str, list[Any]] = {
    "type": [
        *({"type": t} for t in ("string", "integer", "number", "boolean", "null")),
        {"type": "array", "maxItems": 3, "items": _I},
        {"type": "object", "maxProperties": 2, "additionalProperties": _I},
        {"type": ["string", "null"]},
        {"type": ["integer", "boolean"]},
        {"type": []},
        {"type": "float"},
    ],
    "enum": [
        {"enum": ["a", "b c", "ü", '"', "\\"]},
        {"enum": [1, 2.5, -3, 1e3]},
        {"enum": [None, True, False]},
        {"enum": [{"a": 1}, [1, "x"], {}]},
        {"enum": ["red", 4], "type": "string"},
        {"enum": [0, False, ""]},
        {"enum": []},
    ],
    "const": [{"const": v} for v in (2, -1.5, "a\nb", None, [1, {"a": []}], {"k": [False]}, 0)],
    "multipleOf": [
        {"type": "integer", "multipleOf": 7},
        {"type": "integer", "multipleOf": 12, "minimum": -40, "maximum": 100},
        {"type": "number", "multipleOf": 0.01},
        {"type": "number", "multipleOf": 2.5, "minimum": 0, "maximum": 100},
        {"type": "integer", "multipleOf": 0},
    ],
    "minimum": [{"type": t, "minimum": m} for t in ("integer", "number") for m in (-3, 0, 17)]
    + [{"type": "number", "minimum": 0.25}, {"type": "number", "minimum": -1e3}],
    "maximum": [{"type": t, "maximum": m} for t in ("integer", "number") for m in (-3, 0, 17)]
    + [{"type": "integer", "minimum": 3, "maximum": 2}],
    "exclusiveMinimum": [
        {"type": "integer", "exclusiveMinimum": 5},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "number", "exclusiveMinimum": -0.5, "maximum": 0},
    ],
    "exclusiveMaximum": [
        {"type": "integer", "exclusiveMaximum": 5},
        {"type": "integer", "exclusiveMaximum": -5, "minimum": -20},
    ],
    "minLength": [{"type": "string", "minLength": n} for n in (0, 1, 7)],
    "maxLength": [{"type": "string", "maxLength": n} for n in (0, 1, 7)]
    + [{"type": "string", "minLength": 4, "maxLength": 5}, {"type": "string", "maxLength": -1}],
    "pattern": [
        {"type": "string", "pattern": p}
        for p in ("^a+$", "^[A-Z]{2}-[0-9]{3}$", "^(yes|no)$", r"^\d{4}$", "^[^x]{1,4}$", "b")
    ]
    + [
        {"type": "string", "pattern": "^a*$", "maxLength": 3},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": "(a"},
        {"type": "string", "pattern": "^a$", "minLength": 2},
    ],
    "format": [
        {"type": "string", "format": f}
        for f in (
            "date",
            "date-time",
            "time",
            "duration",
            "email",
            "uuid",
            "ipv4",
            "ipv6",
            "hostname",
        )
    ]
    + [{"type": "string", "format": f} for f in ("uri", "iri", "regex", "idn-email", "no-such")],
    "items": [
        {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 4},
        {"type": "array", "items": False},
        {"type": "array", "items": True, "maxItems": 2},
        {"type": "array", "items": {"type": "array", "items": _I, "maxItems": 2}, "maxItems": 2},
    ],
    "prefixItems": [
        {"type": "array", "prefixItems": [_I, {"type": "boolean"}], "items": False},
        {"type": "array", "prefixItems": [_I, _I], "minItems": 2, "items": False},
        {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "maxItems": 4},
    ],
    "minItems": [{"type": "array", "items": _I, "minItems": n, "maxItems": n + 2} for n in (0, 3)]
    + [{"type": "array", "minItems": 4, "maxItems": 2}, {"type": "array", "minItems": -1}],
    "maxItems": [{"type": "array", "items": _I, "maxItems": n} for n in (0, 1, 4)],
    "uniqueItems": [{"type": "array", "uniqueItems": True, "items": _I}],
    "contains": [{"type": "array", "contains": _I}],
    "minContains": [{"type": "array", "contains": _I, "minContains": 2}],
    "maxContains": [{"type": "array", "contains": _I, "maxContains": 2}],
    "unevaluatedItems": [{"type": "array", "prefixItems": [_I], "unevaluatedItems": False}],
    "properties": [
        {"type": "object", "properties": {"a": _I, "b c": _S, 'q"': {"type": "null"}}},
        {"properties": {"a": _I}, "type": "object", "additionalProperties": False},
        {"type": "object", "properties": {"a": False, "b": True}, "additionalProperties": False},
        {"type": "object", "properties": {"é/~": _I}, "required": ["é/~"]},
    ],
    "required": [
        {"type": "object", "required": ["a"]},
        {"type": "object", "properties": {"a": _I, "b": _I}, "required": ["b"]},
        {"type": "object", "required": ["a"], "additionalProperties": False},
    ],
    "additionalProperties": [
        {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
        {"type": "object", "additionalProperties": False},
        {"type": "object", "properties": {"n": _I}, "additionalProperties": _S},
    ],
    "patternProperties": [
        {
            "type": "object",
            "patternProperties": {"^x_[a-z]{1,3}$": _I},
            "additionalProperties": False,
        },
        {
            "type": "object",
            "patternProperties": {"^a": _I, "^b": _S},
            "additionalProperties": False,
            "properties": {"c": {"const": 1}},
        },
        {"type": "object", "patternProperties": {"^a": _I}, "properties": {"ab": {"minimum": 3}}},
    ],
    "propertyNames": [{"type": "object", "propertyNames": {"maxLength": 2}}],
    "minProperties": [
        {"type": "object", "minProperties": 2, "additionalProperties": _I},
        {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": _I},
        {"type": "object", "properties": {"a": _I, "b": _I}, "minProperties": 1},
    ],
    "maxProperties": [
        {"type": "object", "maxProperties": 0},
        {"type": "object", "maxProperties": 1, "additionalProperties": _I},
        {"type": "object", "properties": {"a": _I, "b": _I}, "maxProperties": 1},
    ],
    "dependentRequired": [{"type": "object", "dependentRequired": {"a": ["b"]}}],
    "dependentSchemas": [{"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}],
    "unevaluatedProperties": [{"type": "object", "unevaluatedProperties": False}],
    "anyOf": [
        {"anyOf": [_I, {"type": "boolean"}]},
        {"anyOf": [_S, {"type": "null"}], "maxLength": 3},
        {"anyOf": [{"minimum": 3}, {"maximum": -3}], "type": "integer"},
        {"anyOf": [False, _I]},
        {"anyOf": []},
    ],
    "oneOf": [
        {"oneOf": [_I, _S]},
        {"oneOf": [{"const": "a"}, {"const": "b"}]},
        {"oneOf": [_I, _N]},
        {"oneOf": [_S, {"minLength": 3}]},
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]}
                for k in ("circle", "square")
            ]
        },
    ],
    "allOf": [
        {"allOf": [_I, {"minimum": 3}, {"maximum": 9}]},
        {"allOf": [{"properties": {"a": _I}}, {"required": ["a"]}], "type": "object"},
        {"allOf": [_S, _I]},
        {"allOf": [{"type": "string", "maxLength": 4}, {"pattern": "^a"}]},
        {"allOf": [{"multipleOf": 2}, {"multipleOf": 3}], "type": "integer"},
    ],
    "not": [{"not": _S}, {"type": "integer", "not": {"const": 3}}],
    "if": [{"type": "integer", "if": {"minimum": 3}, "then": {"multipleOf": 2}}],
    "then": [{"type": "integer", "then": {"multipleOf": 2}}],
    "else": [{"type": "integer", "else": {"multipleOf": 2}}],
    "$ref": [
        {"$ref": "#/$defs/a", "$defs": {"a": _I}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"const": "end"}}},
        {"$ref": "#/$defs/a", "minimum": 4, "$defs": {"a": _I}},
        {"type": "object", "properties": {"a": _I, "b": {"$ref": "#/properties/a"}}},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        {"$ref": "#/$defs/no_such"},
        {"$ref": "https://example.org/schema"},
        {"$ref": "#"},
    ],
    "$dynamicRef": [{"$dynamicRef": "#a"}],
    "$dynamicAnchor": [{"$ref": "#/$defs/a", "$defs": {"a": {"$dynamicAnchor": "a"}}}],
    "$anchor": [{"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "integer"}}}],
    # What says nothing of a value.
    "description": [{"type": "integer", "description": "a number", "title": "n", "default": 3}],
    "$comment": [{"$comment": "no", "type": "boolean", "examples": [True], "deprecated": True}],
    "x-vendor": [{"x-vendor": {"a": 1}, "type": "null"}],
}


@dataclass(frozen=True)
class Case:
    """A schema, what it is about, and tokens in which a walk through its grammar should end."""

    about: str
    schema: Any
    most_tokens: int

    @property
    def response_format(self) -> str:
        return canonical(
            {"type": "json_schema", "json_schema": {"name": "f", "schema": self.schema}}
        )


def cases(count: int, seed: int = 0) -> Iterator[Case]:
    """Half of them function calls; the others forms of keywords, first alone, then inside more."""
    chance = random.Random(seed)
    forms = [(about, form) for about, of in KEYWORDS.items() for form in of]
    chance.shuffle(forms)
    for i in range(count):
        if i % 2:
            about, schema = "function call", call_schema(chance)
        else:
            about, schema = forms[(i // 2) % len(forms)]
            if i // 2 >= len(forms) or chance.random() < 0.3:
                schema = _inside(chance, schema)
        yield Case(about, schema, most_tokens(schema, schema))


# --- schemas of function calls --------------------------------------------------------------------

_NAMES = (
    *("location", "unit", "days", "user_id", "start_time", "end_date", "include_details"),
    *("language", "max_results", "sort_order", "query", "tags", "address", "city", "zip_code"),
    *("amount", "currency", "items", "quantity", "note", "priority", "attendees", "email"),
)


def call_schema(chance: random.Random) -> dict[str, Any]:
    """{"name": one of some functions, "arguments": …}, or the arguments alone."""
    defs: dict[str, Any] = {}
    arguments = _object(chance, 2, defs)
    if chance.random() < 0.3:
        return arguments | ({"$defs": defs} if defs else {})
    name = chance.choice(("get_weather", "create_calendar_event", "search_documents"))
    schema = {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    return schema | ({"$defs": defs} if defs else {})


def _object(chance: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    names = chance.sample(_NAMES, chance.randint(1, 5))
    properties = {name: _value(chance, depth, defs) for name in names}
    some = [name for name in names if chance.random() < 0.7]
    closed = chance.random() < 0.85
    return {
        "type": "object",
        "description": "what the function needs",
        "properties": properties,
        "required": names if chance.random() < 0.6 else some,
    } | ({"additionalProperties": False} if closed else {})


def _value(chance: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    kinds: list[Callable[[random.Random, int, dict[str, Any]], dict[str, Any]]]
    kinds = [_text, _text, _number, _choice]
    if depth:
        kinds += [_list, _list, _nested, _union, _shared, _tree]
    return chance.choice(kinds)(chance, depth - 1, defs)


def _text(chance: random.Random, _: int, __: dict[str, Any]) -> dict[str, Any]:
    extras: list[dict[str, Any]] = [
        {},
        {"maxLength": chance.randint(1, 20)},
        {"minLength": 2, "maxLength": chance.randint(2, 9)},
        {"pattern": chance.choice(("^[a-z]{1,8}$", r"^\d{5}$", "^[A-Z]{3}$", "^#[0-9a-f]{6}$"))},
        {"format": chance.choice(("date", "date-time", "uuid", "email"))},
    ]
    return {"type": "string", "description": "a text"} | chance.choice(extras)


def _number(chance: random.Random, _: int, __: dict[str, Any]) -> dict[str, Any]:
    low = chance.randint(-50, 50)
    bounds: list[dict[str, Any]] = [
        {},
        {"minimum": low},
        {"minimum": low, "maximum": low + chance.randint(0, 1000)},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + 10},
    ]
    return {"type": chance.choice(("integer", "number"))} | chance.choice(bounds)


def _choice(chance: random.Random, _: int, __: dict[str, Any]) -> dict[str, Any]:
    forms: list[dict[str, Any]] = [
        {"type": "string", "enum": ["celsius", "fahrenheit", "kelvin"]},
        {"enum": ["low", "high", None, 3]},
        {"const": chance.choice(("v1", 2, True, None))},
        {"type": "boolean"},
        {"type": ["string", "null"], "maxLength": 5},
    ]
    return chance.choice(forms)


def _list(chance: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    least = chance.randint(0, 2)
    most = {"maxItems": least + chance.randint(0, 3)} if chance.random() < 0.8 else {}
    return {"type": "array", "items": _value(chance, depth, defs), "minItems": least} | most


def _nested(chance: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    return _object(chance, depth, defs)


def _union(chance: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    one, other = _value(chance, depth, defs), _value(chance, depth, defs)
    key = chance.choice(("anyOf", "anyOf", "oneOf"))
    if chance.random() < 0.2:
        return {"allOf": [{"type": "integer", "minimum": 0}, {"maximum": 20}]}
    return {key: [one, {"type": "null"} if chance.random() < 0.5 else other]}


def _shared(chance: random.Random, _: int, defs: dict[str, Any]) -> dict[str, Any]:
    name = chance.choice(("Address", "Money"))
    if name not in defs:
        defs[name] = {}  # it may be asked for meanwhile
        defs[name] = _value(chance, 0, defs)
    return {"$ref": f"#/$defs/{name}"}


def _tree(chance: random.Random, _: int, defs: dict[str, Any]) -> dict[str, Any]:
    defs["Node"] = {
        "type": "object",
        "properties": {
            "label": {"type": "string", "maxLength": 4},
            "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}, "maxItems": 2},
        },
        "required": ["label", "children"] if chance.random() < 0.5 else ["label"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/Node"}


def _inside(chance: random.Random, schema: Any) -> Any:
    """The schema as a part of another one. What has references stays at the root."""
    if "$ref" in json.dumps(schema) or "$dynamicRef" in json.dumps(schema):
        return schema
    return chance.choice(
        [
            {"type": "object", "properties": {"v": schema}, "required": ["v"]}
            | {"additionalProperties": False},
            {"type": "array", "items": schema, "minItems": 1, "maxItems": 2},
            {"anyOf": [schema, {"type": "null"}]},
            {"type": "array", "prefixItems": [schema], "items": False, "minItems": 1},
            {"$ref": "#/$defs/v", "$defs": {"v": schema}},
            {"allOf": [schema, {"description": "the same"}]},
        ]
    )


# --- how long an output may get -------------------------------------------------------------------


def most_tokens(schema: Any, root: Any, depth: int = 0) -> int:
    """Tokens in which a walk that takes every chance to end should end, generously."""
    if not isinstance(schema, dict) or depth > 8:
        return FREE
    parts = {k: len(json.dumps(schema[k])) + 4 for k in ("const", "enum") if k in schema}
    total = sum(parts.values()) + FREE
    total += min(int(schema.get("maxLength") or schema.get("minLength") or 0), 1000)
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#/$defs/") and isinstance(root, dict):
        total += most_tokens(root.get("$defs", {}).get(ref[8:], {}), root, depth + 1)
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        total += sum(most_tokens(part, root, depth + 1) for part in schema.get(key, ()))
    for name, part in schema.get("properties", {}).items():
        total += len(name) + 6 + most_tokens(part, root, depth + 1)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            times = max(schema.get("maxItems") or schema.get("minItems") or 0, 3)
            total += times * most_tokens(schema[key], root, depth + 1)
    return int(min(total, 4000))


# --- walks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Walk:
    """An output by chance. `forced`: how many of its tokens were what had to follow."""

    token_ids: tuple[int, ...]
    finished: bool
    forced: int


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


def allowed_ids(bits: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The tokens of one row of a mask, int32 [ceil(vocab_size / 32)]."""
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


def walk(
    grammar: CompiledGrammar,
    chance: random.Random,
    most: int,
    closing: frozenset[int],
    end_ids: Sequence[int] = (END,),
) -> Walk:
    """Tokens by chance of those that are allowed, until it may end. `closing`: tokens that close
    a text or a list; of those one is taken mostly."""
    state = grammar.begin()
    bits = np.empty((1, -(-grammar.vocab_size // 32)), dtype=np.int32)
    out: list[int] = []
    forced = 0
    while len(out) < most:
        known = list(state.forced())
        bits.fill(-1)
        state.masks(bits, [], 0)
        allowed = allowed_ids(bits[0])
        if len(allowed) == 0:
            raise AssertionError(f"nothing may follow {out}")
        ending = [token for token in end_ids if token in allowed]
        if ending:
            return Walk((*out, ending[0]), True, forced + (known[:1] == ending))
        closes = [token for token in allowed if token in closing]
        if known:
            token = known[0]
            if token not in allowed:
                raise AssertionError(f"{token} is forced behind {out}, and is not allowed")
            forced += 1
        else:
            picks = closes if closes and chance.random() < 0.7 else allowed
            token = int(picks[chance.randrange(len(picks))])
        state.append(token)
        out.append(token)
    return Walk(tuple(out), False, forced)


@cache
def closing_ids() -> frozenset[int]:
    """The demo tokenizer's tokens that begin with what closes a value."""
    begin = tuple('"]},')
    return frozenset(i for i in range(1, VOCAB) if tokenizer().decode([i]).startswith(begin))


def text_of(token_ids: Sequence[int]) -> str:
    return str(tokenizer().decode(list(token_ids)))


def problem_of(text: str, schema: Any) -> str:
    """What `jsonschema` has against it; numbers are exact, as binary ones are no multiples."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    try:
        value = json.loads(text, parse_float=_exact)
    except ValueError as error:
        return f"no JSON: {error}"
    errors = _Exact(exact, format_checker=Draft202012Validator.FORMAT_CHECKER).iter_errors(value)
    return next((error.message for error in errors), "")


def _exact(number: str) -> Decimal | float:
    """Some are beyond every decimal, such as 1e99999999999999999999."""
    value = float(number)
    return Decimal(number) if 1e-300 < abs(value) < 1e300 else value


def _multiple_of(_validator: Any, step: Decimal | int, value: Any, _schema: Any) -> Any:
    number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    if number and Fraction(value) % Fraction(step):
        yield ValidationError(f"{value} is no multiple of {step}")


_Exact = extend(Draft202012Validator, {"multipleOf": _multiple_of})
