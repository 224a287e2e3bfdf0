"""An installation's own patterns: checked when they are read, for `re` cannot be stopped later.

A pattern must not be able to take long over any text. So at most one of its repetitions is
unbounded, none stands within another, none is of alternatives, and those that are left can only be
tried in so many ways at a place. The text comes in windows, which bounds what the unbounded one can
reach.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from re import _constants as ops  # type: ignore[attr-defined]  # typeshed leaves the parser out
from re import _parser as parser  # type: ignore[attr-defined]  # the same
from typing import Any

from specbatch.pipeline.privacy.patterns import Place
from specbatch.schemas.errors import UsageError

MOST_PATTERNS, MOST_CHARS = 64, 200
WINDOW_CHARS = 1024
REACH_CHARS = 256  # a find may be so long; windows overlap by it
_MOST_WAYS = 1 << 16  # in which repetitions may be shared out at one place
_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,31}")
_REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT)


def compiled(patterns: Mapping[str, str]) -> dict[str, re.Pattern[str]]:
    """The patterns by name. Raises `UsageError` naming the one that cannot be used."""
    if len(patterns) > MOST_PATTERNS:
        raise UsageError(f"more than {MOST_PATTERNS} patterns to redact: join some with `|`")
    return {name: _compiled(name, pattern) for name, pattern in patterns.items()}


def found(pattern: re.Pattern[str], text: str) -> Iterator[Place]:
    """Where it occurs. What is longer than `REACH_CHARS` may be found in part only."""
    if len(text) <= WINDOW_CHARS:
        yield from (match.span() for match in pattern.finditer(text) if match[0])
        return
    for begin in range(0, len(text), WINDOW_CHARS - REACH_CHARS):
        end = begin + WINDOW_CHARS  # lookbehind still sees what stands before the window
        yield from (match.span() for match in pattern.finditer(text, begin, end) if match[0])


def _compiled(name: str, pattern: str) -> re.Pattern[str]:
    where = f"the pattern {name!r} to redact"
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where} needs a name of capital letters, digits and _, as in [NAME]")
    if not 0 < len(pattern) <= MOST_CHARS:
        raise UsageError(f"{where} has {len(pattern)} characters; 1 to {MOST_CHARS} are allowed")
    try:
        made = re.compile(pattern)
        parsed = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"{where} is no regular expression: {error}") from None
    if made.match("") is not None:
        raise UsageError(f"{where} matches nothing at all, so it would mark every place")
    unbounded, ways = _repeats(parsed, where)
    if unbounded > 1 or ways > _MOST_WAYS:
        raise UsageError(
            f"{where} could take very long: at most one `*` or `+`, and bounds like {{1,20}} on "
            "the others"
        )
    return made


def _repeats(parsed: Any, where: str, inside: bool = False) -> tuple[int, int]:
    """(unbounded repetitions, ways to share out the bounded ones)."""
    unbounded, ways = 0, 1
    for op, argument in parsed:
        if op in _REPEATS:
            least, most, repeated = argument
            if inside and most > 1:
                raise UsageError(f"{where} has a repetition within a repetition: write one of them")
            unbounded += most >= REACH_CHARS
            ways *= most - least + 1 if most < REACH_CHARS else 1
            parts = [repeated]
            inside_it = inside or most > 1
        elif op is ops.BRANCH:
            if inside:
                raise UsageError(f"{where} repeats alternatives: name them one by one")
            parts, inside_it = argument[1], inside
        elif op is ops.SUBPATTERN:
            parts, inside_it = [argument[-1]], inside
        elif op in (ops.ASSERT, ops.ASSERT_NOT):
            parts, inside_it = [argument[1]], inside
        elif op in (ops.GROUPREF, ops.GROUPREF_EXISTS):
            raise UsageError(f"{where} refers back to a group, which can take very long")
        elif op is ops.ATOMIC_GROUP:
            parts, inside_it = [argument], inside
        else:
            continue
        for part in parts:
            more, further = _repeats(part, where, inside_it)
            unbounded, ways = unbounded + more, ways * further
    return unbounded, ways
