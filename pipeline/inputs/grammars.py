"""Compiles the form that an output must have into masks of tokens, with llguidance.

A grammar that is compiled is kept by its text, for the rows of all groups. JSON is written in one
line with one space behind each comma and colon: what cannot vary need not be decided. A schema may
ask for more room with `"x-guidance": {"whitespace_flexible": true}`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from specbatch.schemas.errors import EngineError
from specbatch.schemas.response_format import parsed

_MOST_KEPT = 512  # compiled grammars; the one that was used longest ago goes first
_MOST_FORCED = 64  # tokens that are drafted at once
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Where a JSON schema has further schemas: under these keys, in their lists or by name.
_INNER = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class GrammarError(ValueError):
    """A form that cannot be compiled; the text says what is wrong where."""


class Grammars:
    """The grammars of one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: str, vocab_size: int, end_ids: Sequence[int]) -> None:
        """`tokenizer`: the text of a `tokenizer.json`. `vocab_size`: tokens that have logits.
        `end_ids`: tokens that end an output."""
        self.vocab_size = vocab_size
        self._tokenizer = LLTokenizer(tokenizer, vocab_size, list(end_ids) or None)
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, response_format: str) -> CompiledGrammar:
        """Of a canonical form that is not empty. Raises `GrammarError`."""
        with self._lock:
            if (found := self._kept.get(response_format)) is not None:
                self._kept.move_to_end(response_format)
                return found
        made = CompiledGrammar(self._compiled(response_format), self._tokenizer, self.vocab_size)
        with self._lock:
            self._kept[response_format] = made
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return made

    def _compiled(self, response_format: str) -> LLMatcher:
        kind, value = parsed(response_format)
        schema = {"type": "object"} if kind == "json_object" else value
        of_json = kind in ("json_object", "json_schema")
        grammar = _of_schema(schema) if of_json else _of_text(kind, value)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            problem = _first_line(matcher.get_error())
            if of_json and (path := self._fault(schema)):
                problem = f"at {path}: {problem}"
            raise GrammarError(problem)
        return matcher

    def _fault(self, schema: Any) -> str:
        """The path of the innermost part of a schema that cannot be compiled alone."""
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        path, part = "", schema
        while True:
            for step, inner in _parts(part):
                alone = _of_schema({**shared, **inner})
                if LLMatcher.validate_grammar_with_warnings(alone, self._tokenizer)[0]:
                    path, part = path + step, inner
                    break
            else:
                return path


class CompiledGrammar:
    """One grammar, for any number of outputs."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._first = matcher
        self._end_ids = list(tokenizer.eos_tokens)

    def begin(self) -> GrammarState:
        return GrammarState(self._first.deep_copy(), self._end_ids)


class GrammarState:
    """As the engine's contract says."""

    def __init__(self, matcher: LLMatcher, end_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._end_ids = end_ids

    def append(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise self._broken()

    def masks(self, allowed: NDArray[np.int32], draft: Sequence[int], first: int) -> None:
        matcher, taken = self._matcher, 0
        try:
            for token in draft[:first]:
                if not self._takes(token):
                    return
                taken += 1
            last = len(allowed) - 1
            for row, bits in enumerate(allowed):
                matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
                if matcher.is_error():
                    raise self._broken()
                if row == last or not self._takes(draft[first + row]):
                    return
                taken += 1
        finally:
            if taken:
                matcher.rollback(taken)

    def forced(self) -> list[int]:
        matcher = self._matcher
        if matcher.is_stopped():
            return self._end_ids[:1]
        tokens = matcher.compute_ff_tokens()
        if not tokens:
            return []
        taken = matcher.try_consume_tokens(tokens)
        ends = taken == len(tokens) and matcher.is_stopped()
        matcher.rollback(taken)
        return [*tokens, *self._end_ids[:1]][:_MOST_FORCED] if ends else tokens[:_MOST_FORCED]

    def _takes(self, token: int) -> bool:
        """Whether the draft goes on with the token, which is then behind it. Nothing follows the
        end."""
        return token not in self._end_ids and self._matcher.try_consume_tokens([token]) == 1

    def _broken(self) -> EngineError:
        return EngineError(f"grammar: {_first_line(self._matcher.get_error())}")


def _of_schema(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(orjson.dumps(schema).decode(), defaults=_JSON)


def _of_text(kind: str, value: Any) -> str:
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if kind == "choice":
        value = "start: " + " | ".join(orjson.dumps(choice).decode() for choice in value)
    return LLMatcher.grammar_from_lark(value)


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(step of the path, schema) of the schemas inside one."""
    if not isinstance(schema, dict):
        return
    for key in _NAMED:
        named = schema.get(key)
        for name, inner in named.items() if isinstance(named, dict) else ():
            if isinstance(inner, dict):
                yield f"/{key}/{name}", inner
    for key in _LISTS:
        parts = schema.get(key)
        for at, inner in enumerate(parts) if isinstance(parts, list) else ():
            if isinstance(inner, dict):
                yield f"/{key}/{at}", inner
    for key in _INNER:
        if isinstance(schema.get(key), dict):
            yield f"/{key}", schema[key]


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
