"""Redacts personal data: replaces every find with a mark of its kind, such as `[EMAIL]`.

Knows nothing of jobs, tokens or stores. It keeps what it does not recognise: a name without a
pattern stays, unless Presidio or one of the installation's own patterns finds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from specbatch.pipeline.privacy.patterns import FINDERS, Place, compiled, found
from specbatch.schemas.errors import MissingExtraError

More = Callable[[str], Iterator[tuple[str, Place]]]  # a text to kinds and places

# Quotes in a message are user data. A truncated message has no closing quote.
# In quotes as `repr` writes them, or a place in a JSON document.
_QUOTED = re.compile(r"(?<!\w)b?([\"'])(?:\\.|(?!\1).)*+(?:\1|\Z)|(?<=\bat )(?:… )?/\S+", re.DOTALL)

_ESCAPE = re.compile(r"""\\(?:(["\\/bfnrt])|u([0-9A-Fa-f]{4}))""")
_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_JSON_IN_JSON = 2  # escapes within escapes, as in the arguments of a call


class Span(NamedTuple):
    """A find: characters `start` to `stop` of the text."""

    start: int
    stop: int
    kind: str


class Redactor:
    """Finds and replaces. Thread-safe; the same text gives the same finds."""

    def __init__(
        self, patterns: Mapping[str, str] | None = None, more: Callable[[], More] | None = None
    ) -> None:
        """`patterns`: an installation's own, by the name of their mark. `more`: makes another
        finder when the first text comes. Raises `UsageError` for an invalid pattern."""
        self._own = compiled(patterns or {})
        self._make_more = more
        self._more: More | None = None

    def spans(self, text: str) -> list[Span]:
        """The finds in order; those that overlap are one.

        JSON is searched as what its escapes stand for, too: they hide finds, and their letters
        touch what comes next.
        """
        spans = list(self._found(text))
        read = text
        starts: Sequence[int] = range(len(text) + 1)  # of what was read, in the text
        for _ in range(_JSON_IN_JSON):
            before = len(read)
            read, starts = unescaped(read, starts)
            if len(read) == before:
                break
            spans += (Span(starts[a], starts[b], kind) for a, b, kind in self._found(read))
        return merged(spans)

    def redacted(self, text: str) -> str:
        spans = self.spans(text)
        return replaced(text, spans) if spans else text

    def without_quotes(self, text: str) -> str:
        """One of our messages, redacted and without the values that it quotes."""
        return self.redacted(_QUOTED.sub("[…]", text))

    def _found(self, text: str) -> Iterator[Span]:
        for name, pattern in self._own.items():
            yield from (Span(*place, name) for place in found(pattern, text))
        for kind, finder in FINDERS:
            yield from (Span(*place, kind) for place in finder(text))
        if self._make_more is not None:
            self._more = self._more or self._make_more()
            yield from (Span(*place, kind) for kind, place in self._more(text))


def unescaped(text: str, starts: Sequence[int]) -> tuple[str, Sequence[int]]:
    """A text with what JSON's escapes stand for, and of each character, and of the end, the start.
    `starts`: those of the text. Half of a surrogate pair is one character."""
    if "\\" not in text:
        return text, starts
    parts: list[str] = []
    kept: list[int] = []
    place = 0
    for match in _ESCAPE.finditer(text):
        begin, end = match.span()
        parts += (text[place:begin], _stands_for(match))
        kept += starts[place : begin + 1]
        place = end
    return "".join((*parts, text[place:])), [*kept, *starts[place:]]


def _stands_for(escape: re.Match[str]) -> str:
    char, code = escape.groups()
    if char is not None:
        return _SHORT.get(char, char)
    number = int(code, 16)
    return "\N{REPLACEMENT CHARACTER}" if 0xD800 <= number < 0xE000 else chr(number)


def merged(found: Iterable[Span]) -> list[Span]:
    """The spans in order, overlaps joined. The first find of an overlap gives the kind."""
    ordered = sorted(enumerate(found), key=lambda item: (item[1].start, -item[1].stop))
    result: list[tuple[int, Span]] = []
    for rank, span in ordered:
        if result and span.start < result[-1][1].stop:
            known, last = result[-1]
            kind = last.kind if known <= rank else span.kind
            result[-1] = (min(known, rank), Span(last.start, max(last.stop, span.stop), kind))
        else:
            result.append((rank, span))
    return [span for _, span in result]


def replaced(text: str, spans: Sequence[Span]) -> str:
    """The text with a mark for each span. Spans are cut at the text's end."""
    parts, place = [], 0
    for start, stop, kind in spans:
        if start >= len(text):
            break
        parts += [text[place:start], f"[{kind}]"]
        place = stop
    return "".join((*parts, text[place:]))


MIN_SCORE = 0.4


def presidio_finder(language: str) -> Callable[[str], Iterator[tuple[str, Place]]]:
    """A finder of (kind, place) that uses Presidio's analyser. Loads its models once.

    Raises `MissingExtraError`.
    """
    try:
        from presidio_analyzer import AnalyzerEngine
    except ImportError:
        raise MissingExtraError(
            "SPECBATCH_PRESIDIO needs Presidio and a model of spaCy: pip install "
            "'specbatch[privacy]' && python -m spacy download en_core_web_lg"
        ) from None
    analyser: Any = AnalyzerEngine()

    def found(text: str) -> Iterator[tuple[str, Place]]:
        for result in analyser.analyze(text=text, language=language, score_threshold=MIN_SCORE):
            yield result.entity_type, (result.start, result.end)

    return found
