"""Patterns of personal data and secrets. Pure functions from a text to the places of one kind.

Each function starts with a cheap test (a character, a word) that most texts fail, so that text
without personal data costs little. Every loop in an expression is bounded, or its characters cannot
match what follows.

An installation's own patterns are checked when they are read, because nothing can stop `re` later.
No pattern may take long over any text. So at most one repetition is unbounded, none is inside
another or repeats alternatives, and the others can match in only so many ways at one place. Windows
of text limit the reach of the unbounded one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address
from itertools import accumulate
from re import _constants as ops  # type: ignore[attr-defined]  # typeshed leaves the parser out
from re import _parser as parser  # type: ignore[attr-defined]  # the same
from string import ascii_uppercase
from typing import Any

from specbatch.schemas.errors import UsageError

Place = tuple[int, int]  # of the first character, and behind the last
Finder = Callable[[str], Iterator[Place]]

_EMAIL = re.compile(r"[\w.%+'-]{1,64}@(?:[\w-]{1,63}\.){1,8}[^\W\d_]{2,24}")
_KEY_HINTS = (
    *("sk-", "sk_", "pk_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox"),
    *("AKIA", "ASIA", "AIza", "eyJ", "hf_", "npm_", "pypi-", "PRIVATE KEY", "SG."),
)
_KEYS = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY-----"  # one without its end reaches to the text's
    r"(?:[\s\S]{0,16000}?-----END [A-Z0-9 ]{0,30}PRIVATE KEY-----|[\s\S]*)"
    r"|(?<![A-Za-z0-9])(?:"
    r"sk-[\w-]{16,256}|[sp]k_(?:live|test)_\w{10,256}"
    r"|gh[opusr]_\w{20,256}|github_pat_\w{20,256}|glpat-[\w-]{16,256}"
    r"|xox[a-z]-[\w-]{10,256}|A(?:KI|SI)A[0-9A-Z]{16}|AIza[\w-]{30,64}"
    r"|hf_\w{20,256}|npm_\w{20,256}|pypi-[\w-]{20,512}|SG\.[\w-]{16,64}\.[\w-]{16,128}"
    r"|eyJ[\w-]{8,4096}+\.[\w-]{8,8192}+(?:\.[\w-]{0,2048}+)?)"
)
_NAMED_HINTS = ("passw", "secret", "api", "access", "auth", "bearer")  # how `_NAMED` begins
_NAMED = re.compile(
    r"(?i)(?:passwor[dt]|passwd|secret(?:[_ -]?access)?(?:[_ -]?key)?|(?:auth|access)[_ -]?token"
    r"|api[_ -]?key|access[_ -]?key)[\"']?\s{0,4}[:=]\s{0,4}[\"']?([^\s\"',;]{8,512})"
    r"|bearer\s{1,4}([\w.~+/=-]{16,4096})"
)
# Stretches of digits with what people write between them: phones and cards are looked for there.
_NUMBERS = re.compile(r"[+(]?\d(?:[ ().\-/\u00a0\u2011]{0,3}\d){6,}+")
_PHONE = re.compile(
    r"(?:\+|00)[1-9]\d{0,2}(?:[ .\-/\u00a0\u2011]?\(?\d{1,12}\)?){1,8}"  # +49 (0)30 901820
    r"|\(\d{2,5}\)[ .\-/\u00a0]?\d{2,5}(?:[ .\-/\u00a0\u2011]?\d{2,5}){1,4}"  # (030) 901 820
    r"|0\d{1,5}[ .\-/\u00a0\u2011]{1,2}\d{2,8}(?:[ .\-/\u00a0\u2011]?\d{2,5}){0,4}"  # 030 901820
    r"|\d{3}[ .\-\u2011]\d{3}[ .\-\u2011]\d{4}"  # 555-010-9999
)
_DATE = re.compile(  # alone, or before a space
    r"\d{1,2}([./\-])\d{1,2}\1(?:\d{2,4}\Z|\d{4}[ \u00a0])"
    r"|\d{4}([./\-])\d{1,2}\2\d{1,2}(?:\Z|[ \u00a0])"
)
_DIGIT_GROUP = re.compile(r"\d+")
_IPV4 = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?!\.?\d)")
_COLONS = re.compile(r":[0-9A-Fa-f]{0,4}:")
_IPV6 = re.compile(
    r"(?:(?<![\w:.])|(?<=\w:))"  # also behind `peer:`
    r"[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,8}(?:[.:][\d.]{7,15})?(?!\w)"
)
_IBAN = re.compile(
    r"(?<!\w)[A-Z]{2}\d{2}(?:[ \u00a0]?[A-Z0-9]{4}){2,7}(?:[ \u00a0]?[A-Z0-9]{1,3})?(?!\w)"
)
_GAP = re.compile(r"[ \u00a0]")
_IBAN_DIGITS = {ord(char): str(int(char, 36)) for char in ascii_uppercase}

_CARD_DIGITS, _PHONE_DIGITS = (13, 20), (7, 15)  # of cards one more than the most


def emails(text: str) -> Iterator[Place]:
    if "@" in text:
        yield from (match.span() for match in _EMAIL.finditer(text))


def keys(text: str) -> Iterator[Place]:
    """Tokens of well-known services, private keys, and values behind `password=`."""
    if any(hint in text for hint in _KEY_HINTS):
        yield from (match.span() for match in _KEYS.finditer(text))
    lower = text.replace("İ", "i").lower()  # the only character that is two in lower case
    for hint in _NAMED_HINTS:
        place = lower.find(hint)
        while place >= 0:
            if match := _NAMED.match(text, place):
                yield match.span(match.lastindex or 0)
            place = lower.find(hint, place + 1)


def ips(text: str) -> Iterator[Place]:
    if text.count(".") > 2:
        for match in _IPV4.finditer(text):
            if all(int(part) < 256 for part in match[0].split(".")):
                yield match.span()
    if _COLONS.search(text):
        for match in _IPV6.finditer(text):
            if sum(map(str.isalnum, match[0])) <= 2:
                continue
            last = max(text.rfind(mark, *match.span()) for mark in ":.")
            for end in (match.end(), last):  # a colon, full stop or port looks like a part of it
                if _is_ip(text[match.start() : end]):
                    yield match.start(), end
                    break


def ibans(text: str) -> Iterator[Place]:
    """Each reaches to the last space, or the end of what looks like one, where its check fits: a
    word of capital letters behind an IBAN looks like a part of it."""
    at = 0
    while match := _IBAN.search(text, at):
        at = match.start() + 1
        written = match[0]
        ends = [*(gap.start() for gap in _GAP.finditer(written)), len(written)]
        for end in reversed(ends):
            if _is_iban(written[:end]):
                at = match.start() + end
                yield match.start(), at
                break


def cards(text: str) -> Iterator[Place]:
    """Numbers of 13 to 19 whole digit groups with a correct check digit."""
    for stretch in _NUMBERS.finditer(text):
        begin, written = stretch.start(), stretch[0]  # each asking for it would copy all of it
        groups = [match.span() for match in _DIGIT_GROUP.finditer(written)]
        digits = [int(char) for start, stop in groups for char in written[start:stop]]
        if len(digits) < _CARD_DIGITS[0]:
            continue
        starts, ends, at = [], {}, 0  # in digits; of ends, where they are in the text
        for start, stop in groups:
            starts.append((at, start))
            at += stop - start
            ends[at] = stop
        sums = _luhn_sums(digits)
        for first, start in starts:
            for length in range(*_CARD_DIGITS):
                end = ends.get(first + length)
                if end is not None and _is_card(digits, sums, first, first + length):
                    yield begin + start, begin + end


def phones(text: str) -> Iterator[Place]:
    """Numbers of 7 to 15 digits. What follows one, such as a postal code, looks like a part of it:
    of a longer match the first digit groups count, and the next may begin at any space within."""
    for stretch in _NUMBERS.finditer(text):
        begin, written, at = stretch.start(), stretch[0], 0
        while match := _PHONE.search(written, at):
            end = _phone_end(text, begin, match)
            if end is not None:
                yield begin + match.start(), begin + end
            at = match.end()
            if end != at and (gap := _GAP.search(written, match.start() + 1, at)):
                at = gap.end()


FINDERS: tuple[tuple[str, Finder], ...] = (  # of places that overlap the first kind names them
    ("KEY", keys),
    ("EMAIL", emails),
    ("IBAN", ibans),
    ("CARD", cards),
    ("IP", ips),
    ("PHONE", phones),
)


def _luhn_sums(digits: list[int]) -> tuple[list[int], list[int]]:
    """Sums up to each digit: as they are at even places, doubled at odd ones; and the reverse."""
    sums = ([0], [0])
    for place, digit in enumerate(digits):
        doubled = 2 * digit - 9 * (digit > 4)
        for parity, so_far in enumerate(sums):
            so_far.append(so_far[-1] + (digit if place % 2 == parity else doubled))
    return sums


def _is_card(digits: list[int], sums: tuple[list[int], ...], first: int, stop: int) -> bool:
    """Whether these digits start like a card's and end with their check digit."""
    of = sums[(stop - 1) % 2]  # the last one is taken as it is
    return 2 <= digits[first] <= 6 and (of[stop] - of[first]) % 10 == 0


def _phone_end(text: str, begin: int, match: re.Match[str]) -> int | None:
    """Where the longest phone number at a match's start ends; None: there is none. `begin`: of what
    was searched, in the text. No letter or digit touches it, so that it is no part of a name."""
    before = begin + match.start() - 1
    if before >= 0 and (text[before].isalnum() or text[before] == "_"):
        return None
    groups = [group.span() for group in _DIGIT_GROUP.finditer(match.string, *match.span())]
    ends = [stop for _, stop in groups[:-1]] + [match.end()]
    digits = list(accumulate(stop - start for start, stop in groups))
    for end, count in zip(reversed(ends), reversed(digits), strict=True):
        touched = begin + end < len(text) and text[begin + end].isalnum()
        if _PHONE_DIGITS[0] <= count <= _PHONE_DIGITS[1] and not touched:
            return None if _DATE.match(match.string, match.start(), end) else end
    return None


def _is_ip(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _is_iban(written: str) -> bool:
    text = _GAP.sub("", written)
    moved = (text[4:] + text[:4]).translate(_IBAN_DIGITS)
    return 15 <= len(text) <= 34 and int(moved) % 97 == 1


MOST_PATTERNS, MOST_CHARS = 64, 200
WINDOW_CHARS = 1024
REACH_CHARS = 256  # the longest find; windows overlap by it
_MOST_WAYS = 1 << 16  # ways in which bounded repetitions may match at one place
_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,31}")
_REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT)


def compiled(patterns: Mapping[str, str]) -> dict[str, re.Pattern[str]]:
    """The patterns by name. Raises `UsageError` naming the one that cannot be used."""
    if len(patterns) > MOST_PATTERNS:
        raise UsageError(f"more than {MOST_PATTERNS} patterns to redact: join some with `|`")
    return {name: _compiled(name, pattern) for name, pattern in patterns.items()}


def found(pattern: re.Pattern[str], text: str) -> Iterator[Place]:
    """Where a pattern occurs. Only a part of a find beyond `REACH_CHARS` may be found."""
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
        raise UsageError(f"{where} is not a regular expression: {error}") from None
    if made.match("") is not None:
        raise UsageError(f"{where} matches the empty text, so it would mark every place")
    unbounded, ways = _repeats(parsed, where)
    if unbounded > 1 or ways > _MOST_WAYS:
        raise UsageError(
            f"{where} could take very long: at most one `*` or `+`, bounds like {{1,20}} on the "
            "others, and `?+` for a `?` that is repeated"
        )
    return made


def _repeats(parsed: Any, where: str, inside: bool = False) -> tuple[int, int]:
    """(unbounded repetitions, ways in which the rest may match: to share out bounded ones, to take
    or leave what is optional, alternatives)."""
    unbounded, ways = 0, 1
    for op, argument in parsed:
        if op in _REPEATS:
            least, most, repeated = argument
            if inside and most > 1:
                raise UsageError(f"{where} has a repetition within a repetition: write one of them")
            more, more_ways = _repeats(repeated, where, inside or most > 1)
            more += most >= REACH_CHARS
            if op is not ops.POSSESSIVE_REPEAT:  # which tries none of them again
                more_ways **= min(most, REACH_CHARS)
                more_ways *= most - least + 1 if most < REACH_CHARS else 1
        elif op is ops.BRANCH:
            if inside:
                raise UsageError(f"{where} repeats alternatives: name them one by one")
            branches = [_repeats(part, where) for part in argument[1]]
            more, more_ways = (sum(counts) for counts in zip(*branches, strict=True))
        elif op is ops.SUBPATTERN:
            more, more_ways = _repeats(argument[-1], where, inside)
        elif op in (ops.ASSERT, ops.ASSERT_NOT):
            more, more_ways = _repeats(argument[1], where, inside)
        elif op in (ops.GROUPREF, ops.GROUPREF_EXISTS):
            raise UsageError(f"{where} refers back to a group, which may take very long")
        elif op is ops.ATOMIC_GROUP:
            more, more_ways = _repeats(argument, where, inside)
        else:
            continue
        unbounded, ways = unbounded + more, ways * more_ways
    return unbounded, ways
