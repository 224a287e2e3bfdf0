"""Compiles the form that an output must have into masks of tokens, with llguidance.

A grammar that is compiled is kept by its text, for the rows of all groups. JSON is written in one
line with one space behind each comma and colon: what cannot vary need not be decided. A schema may
ask for more room with `"x-guidance": {"whitespace_flexible": true}`.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import orjson
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from specbatch.schemas.errors import EngineError
from specbatch.schemas.response_format import parsed
from specbatch.schemas.tools import TAGS, TOOLS, CallForm, call_form

_MOST_KEPT = 128  # compiled grammars; the one that was used longest ago goes first
_MOST_FORCED = 64  # tokens that are drafted at once …
_MOST_KNOWN = 4_096  # … and that are kept, of a longer text that is forced
_MOST_PROPERTIES, _MOST_PROPERTIES_IN_ALL = 1_000, 4_000  # of a schema
_FAULT_BYTES = 1 << 20  # of schemas that are compiled to find out what is wrong with one
_LONGEST_SAID, _LONGEST_PATH = 240, 160  # characters of a message
_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): ")  # in Lark's notation
_SAID = {  # instead of messages that say little, or very much
    "NoExtension": "nothing fits it",
    "Unsatisfiable schema: Regex is empty": "no text fits its pattern, format and length",
    "parser error: Too many items": "what it forces has no end, or is too long",
    "lexer error: too many expressions": "what it forces has no end, or is too long",
    "Resource '": "its $ref leads out of the schema, and nothing is fetched",
    "recursion limit exceeded": "it is nested too deeply",
    "panic: ": "it is too large",
}
_JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# What llguidance allows of a format and parsers refuse: the year 0, 29 February of every year, a
# leap second at any time.
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_FOURS = "(0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"^({_YEAR}-(0[13-9]|1[0-2])-[0-9]{{2}}|{_YEAR}-02-([01][0-9]|2[0-8])"
    f"|([0-9]{{2}}{_FOURS}|{_FOURS}00)-02-29)"
)
_STRICT = {
    "date": _DATE,
    "time": "^[^:]*:[^:]*:[0-5]",
    "date-time": f"{_DATE}[^:]*:[^:]*:[0-5]",
}
_VALUES = ("const", "enum", "default", "examples")  # where a JSON schema has no schemas
# Where it has further schemas: under these keys, in their lists or by name.
_INNER = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


# The first lexemes of calls. Where an answer may stand instead, one that it may not begin with is
# a lexeme as a whole: of two lexemes the longer one counts, and an answer has no end.
_CALLS_ALONE = (r'OBJECT: "{\"name\": "', r'ARRAY: "[{\"name\": "')
_OR_ANSWER = (
    r'OBJECT: /[ \t\r\n]*\{"name": /',
    r'ARRAY: /[ \t\r\n]*\[\{"name": /',
    r'TEXT: /(?s:.*)/ & ~/[ \t\r\n]*\[?\{"name"(?s:.*)/',
    f"ANSWER: TEXT & ~/(?s:.*){TAGS[0]}(?s:.*)/",
    f"MORE: /(?s:.*)/ & ~/(?s:.*){TAGS[0]}(?s:.*)/",
)


class GrammarError(ValueError):
    """A form that cannot be compiled; the text says what is wrong where."""


class Grammars:
    """The grammars of one tokenizer. Thread-safe."""

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int,
        end_ids: Sequence[int],
        shown: Mapping[str, int] | None = None,
    ) -> None:
        """`tokenizer`: the text of a `tokenizer.json`. `vocab_size`: tokens that have logits.
        `end_ids`: tokens that end an output. `shown`: added tokens that texts show; a grammar
        must name them, as it does not read them as what they show."""
        self.vocab_size = vocab_size
        self._tokenizer = LLTokenizer(tokenizer, vocab_size, list(end_ids) or None)
        self._shown = {
            text: token
            for text, token in (shown or {}).items()
            if token < vocab_size and self._tokenizer.is_special_token(token)
        }
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()  # one at a time: it may take seconds

    def of(self, response_format: str) -> CompiledGrammar:
        """Of a canonical form that is not empty. Raises `GrammarError`."""
        if (known := self._known(response_format)) is not None:
            return known
        with self._compiling:
            if (known := self._known(response_format)) is not None:  # by another thread
                return known
            make = partial(self._compiled, response_format)
            made = CompiledGrammar(make, self._tokenizer.eos_tokens, self.vocab_size)
            with self._lock:
                self._kept[response_format] = made
                if len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
            return made

    def _known(self, response_format: str) -> CompiledGrammar | None:
        with self._lock:
            found = self._kept.get(response_format)
            if found is not None:
                self._kept.move_to_end(response_format)
            return found

    def _compiled(self, response_format: str) -> LLMatcher:
        kind, value = parsed(response_format)
        if kind == TOOLS:
            return self._of_tools(call_form(value))
        if kind not in ("json_object", "json_schema"):
            return self._made(_of_text(kind, value))
        return self._of_json({"type": "object"} if kind == "json_object" else value)

    def _of_json(self, schema: Any) -> LLMatcher:
        _check_size(schema)
        try:
            return self._made(_of_schema(schema))
        except GrammarError as error:
            path, problem = self._fault(schema)
            where = path if len(path) <= _LONGEST_PATH else f"… {path[-_LONGEST_PATH:]}"
            raise GrammarError(f"at {where}: {problem}" if path else str(error)) from None

    def _of_tools(self, form: CallForm) -> LLMatcher:
        tags = [tag for tag in TAGS if tag in self._shown]
        beside = [token for text, token in self._shown.items() if text not in TAGS]
        try:
            _check_size({"anyOf": list(form.functions.values())})
            return self._made(LLMatcher.grammar_from_lark(_of_calls(form, tags, beside)))
        except GrammarError:
            for name, schema in form.functions.items():
                try:
                    self._of_json(schema)
                except GrammarError as error:
                    raise GrammarError(f"of {name!r} have parameters {error}") from None
            raise

    def _made(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            start = matcher.deep_copy()
            start.compute_bitmask()
            start.try_consume_tokens(start.compute_ff_tokens())
            if not start.is_error():
                return matcher
            matcher = start
        raise GrammarError(_sentence(matcher.get_error()))

    def _fault(self, schema: Any) -> tuple[str, str]:
        """The path of the innermost part of a schema that cannot be compiled alone, down to one
        keyword if it is that alone, and what is wrong with it."""
        root = _moved(schema)
        tries = max(_FAULT_BYTES // len(orjson.dumps(root)), 1)

        def problem_of(part: dict[str, Any]) -> str:
            nonlocal tries
            tries -= 1
            if tries < 0:
                return ""
            try:
                self._made(_of_schema({**part, "$defs": {"root": root}}))
            except GrammarError as error:
                return str(error)
            return ""

        path, part, problem = "", root, ""
        while True:
            for step, inner in _parts(part):
                if found := problem_of(inner):
                    path, part, problem = path + step, inner, found
                    break
            else:
                break
        keys = sorted(part, key="type".__eq__) if isinstance(part, dict) else ()  # it is last
        for key in keys:
            without = {other: value for other, value in part.items() if other != key}
            if tries > 0 and (problem or (problem := problem_of(part))) and not problem_of(without):
                return f"{path}/{key}", problem
        return path, problem


class CompiledGrammar:
    """One grammar, for any number of outputs. Thread-safe."""

    def __init__(
        self, make: Callable[[], LLMatcher], end_ids: Sequence[int], vocab_size: int
    ) -> None:
        self.vocab_size = vocab_size
        self.end_ids = list(end_ids)
        self._make = make
        self._first = make()

    def begin(self) -> GrammarState:
        return GrammarState(self)

    def matcher(self) -> LLMatcher:
        """One at the beginning."""
        return self._first.deep_copy()

    def renewed(self) -> LLMatcher:
        """One that shares nothing with those before: all of a grammar share the states of its
        lexer, and fail together once these are too many."""
        self._first = self._make()
        return self.matcher()


class GrammarState:
    """As the engine's contract says."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher()
        self._end_ids = grammar.end_ids
        self._tokens: list[int] = []
        self._forced: list[int] = []  # behind them, as far as it is known

    def append(self, token: int) -> None:
        if not self._matcher.consume_token(token) and not (
            self._renewed() and self._matcher.consume_token(token)
        ):
            # Nothing of the message: it would quote the output.
            raise EngineError(
                "its response format cannot be followed any further: it is too complex"
            )
        self._tokens.append(token)
        self._forced = self._forced[1:] if self._forced[:1] == [token] else []

    def masks(self, allowed: NDArray[np.int32], draft: Sequence[int], first: int) -> None:
        row = self._filled(allowed, draft, first)
        if row is not None and self._renewed():
            row = self._filled(allowed, draft, first)
        if row is not None:  # then nothing may follow there, which matters if it is reached
            allowed[row:] = 0
            self._matcher = self._grammar.renewed()
            self._matcher.consume_tokens(self._tokens)

    def forced(self) -> list[int]:
        matcher = self._matcher
        if matcher.is_stopped():
            return self._end_ids[:1]
        if not self._forced and (tokens := matcher.compute_ff_tokens()):
            taken = matcher.try_consume_tokens(tokens)
            ends = taken == len(tokens) and matcher.is_stopped()
            if matcher.is_error():  # for good: what is forced had no end
                self._matcher = self._grammar.renewed()
                self._matcher.consume_tokens(self._tokens)
            else:
                matcher.rollback(taken)
                tokens += self._end_ids[: int(ends)]
            self._forced = tokens[:_MOST_KNOWN]
        return self._forced[:_MOST_FORCED]

    def _filled(self, allowed: NDArray[np.int32], draft: Sequence[int], first: int) -> int | None:
        """The row at which the grammar gave up; None: it did not."""
        matcher, taken = self._matcher, 0
        try:
            for token in draft[:first]:
                if not self._takes(token):
                    return None
                taken += 1
            last = len(allowed) - 1
            for row, bits in enumerate(allowed):
                matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
                if matcher.is_error():
                    return row
                if row == last or not self._takes(draft[first + row]):
                    return None
                taken += 1
            return None
        finally:
            if taken:
                matcher.rollback(taken)

    def _renewed(self) -> bool:
        """Whether it was the lexer that gave up, maybe by what other outputs did to it: the state
        then continues with a new one."""
        if "lexer error" not in self._matcher.get_error():
            return False
        self._matcher = self._grammar.renewed()
        return bool(self._matcher.consume_tokens(self._tokens))

    def _takes(self, token: int) -> bool:
        """Whether the draft continues with the token, which is then behind it. Nothing follows the
        end."""
        return token not in self._end_ids and self._matcher.try_consume_tokens([token]) == 1


def _of_schema(schema: Any) -> str:
    if schema is False:
        raise GrammarError("nothing fits it")
    text = orjson.dumps({} if schema is True else _strict(schema)).decode()
    try:
        return LLMatcher.grammar_from_json_schema(text, defaults=_JSON)
    except ValueError as error:
        raise GrammarError(_sentence(str(error))) from None


def _of_calls(form: CallForm, tags: Collection[str], beside: Sequence[int]) -> str:
    """In Lark's notation, with the `tags` that are one token each, and the tokens that answers may
    have `beside` their text."""
    functions = range(len(form.functions))
    tag, end = (name if name in tags else orjson.dumps(name).decode() for name in TAGS)
    tagged = rf'"\n{{\"name\": " call "\n" {end}'
    starts = ["OBJECT call", f"tag {tagged}"]
    if form.many:
        starts[1] += rf' ("\n" {tag} {tagged})*'
        starts.append(r'ARRAY call (", {\"name\": " call)* "]"')
    if form.may_answer:
        starts.append("answer")
    rules = [
        "start: " + " | ".join(starts),
        f'call: ({" | ".join(f"f{number}" for number in functions)}) "}}"',
    ]
    if form.may_answer:
        rules += [*_OR_ANSWER, *_answer_rules(tag, tags, beside)]
    else:
        rules += [*_CALLS_ALONE, f"tag: {tag}"]
    for number, (name, schema) in enumerate(form.functions.items()):
        own = schema.get("x-guidance") or {}
        if not isinstance(own, dict):
            raise GrammarError("x-guidance is no object")
        guidance = {"x-guidance": _JSON | own}
        arguments = orjson.dumps(_strict(schema) | guidance).decode()
        rules.append(rf'f{number}: "\"{name}\", \"arguments\": " %json {arguments}')
    return "\n".join(rules)


def _answer_rules(tag: str, tags: Collection[str], beside: Sequence[int]) -> Iterator[str]:
    """Of a text, and of one that leads to a tag."""
    others = f"<[{','.join(map(str, beside))}]>"
    yield "answer: ANSWER" + (f" ({others} MORE)*" if beside else "")
    if tag in tags:
        yield f"tag: answer {tag}"
        return
    yield "tag: opens" + (f" | answer {others} opens_later" if beside else "")
    yield f"opens[lazy]: TEXT {tag}"
    if beside:
        yield f"opens_later[lazy]: /(?s:.*)/ {tag}"


def _strict(schema: Any) -> Any:
    """The same, with a pattern beside each format of `_STRICT`."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {k: part if k in _VALUES else _strict(part) for k, part in schema.items()}
    form = schema.get("format")
    if isinstance(form, str) and form in _STRICT:
        also = {"pattern": _STRICT[form]}
        others = strict.get("allOf", [])
        if "pattern" not in strict:
            strict |= also
        elif isinstance(others, list):
            strict["allOf"] = [*others, also]
    return strict


def _check_size(schema: Any) -> None:
    """Objects of so many properties take seconds to compile: their price grows as the square."""
    in_all, left = 0, [schema]
    while left:
        part = left.pop()
        left += [inner for _, inner in _parts(part)]
        properties = part.get("properties") if isinstance(part, dict) else None
        count = len(properties) if isinstance(properties, dict) else 0
        in_all += count
        if count > _MOST_PROPERTIES or in_all > _MOST_PROPERTIES_IN_ALL:
            raise GrammarError(
                f"more than {_MOST_PROPERTIES:,} properties in an object, or "
                f"{_MOST_PROPERTIES_IN_ALL:,} in all"
            )


def _moved(schema: Any) -> Any:
    """The same as the definition `root` of another schema: references say so."""
    if isinstance(schema, list):
        return [_moved(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(part) for key, part in schema.items()}
    ref = moved.get("$ref")
    if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
        moved["$ref"] = f"#/$defs/root{ref[1:]}"
    return moved


def _of_text(kind: str, value: Any) -> str:
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if kind == "choice":
        value = "start: " + " | ".join(orjson.dumps(choice).decode() for choice in value)
        value = value.replace("\x7f", "\\u007f")  # which Lark knows in no other way
    return LLMatcher.grammar_from_lark(value)


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(step of the path, schema) of the schemas inside one."""
    if not isinstance(schema, dict):
        return
    for key in _NAMED:
        named = schema.get(key)
        for name, inner in named.items() if isinstance(named, dict) else ():
            if isinstance(inner, dict):
                yield f"/{key}/{name.replace('~', '~0').replace('/', '~1')}", inner
    for key in _LISTS:
        parts = schema.get(key)
        for at, inner in enumerate(parts) if isinstance(parts, list) else ():
            if isinstance(inner, dict):
                yield f"/{key}/{at}", inner
    for key in _INNER:
        if isinstance(schema.get(key), dict):
            yield f"/{key}", schema[key]


def _sentence(text: str) -> str:
    """What is wrong, of a message of several lines, in one."""
    lines = text.strip().splitlines() or ["it cannot be compiled"]
    said, reason = lines[0].strip(), [x[7:] for x in lines if x.startswith("error: ")]
    if said.endswith("regex parse error:") and reason:
        pattern = next((x.strip() for x in lines[1:]), "")
        return f"the pattern {pattern:.80} cannot be read: {reason[0]}"
    for begin, instead in _SAID.items():
        if said.startswith(begin):
            return instead
    if position := _POSITION.match(said):
        said = f"line {position[1]}, column {position[2]}: {said[position.end() :]}"
    said = said.replace("min/maxProperties", "minProperties and maxProperties are")
    return said if len(said) <= _LONGEST_SAID else f"{said[:_LONGEST_SAID]} …"
