"""HTML in which nothing is markup unless this module made it so. No template engine is needed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

_VOID = frozenset({"br", "circle", "hr", "line", "link", "meta", "path", "rect"})
# Control characters that HTML has no place for, halves of characters that UTF-8 has none for, and
# what shows words in another order than they have.
_NOT_TEXT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff\ud800-\udfff"
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Content = object  # an `Html` as it is, None as nothing, an iterable in turn, all else as text


def text(value: object) -> Html:
    """A value as text that a browser shows and does not obey."""
    return Html(escape(_NOT_TEXT.sub("\ufffd", str(value)), quote=True))


def join(*contents: Content) -> Html:
    """Contents one after the other."""
    return Html("".join(map(_content, contents)))


def tag(name: str, /, *contents: Content, **attributes: object) -> Html:
    """An element. `class_` is class and `aria_label` aria-label; None and False leave one out."""
    named = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID and not contents:
        return Html(f"<{name}{named}/>")
    return Html(f"<{name}{named}>{join(*contents)}</{name}>")


def _content(value: Content) -> str:
    if isinstance(value, Html):
        return value
    if value is None:
        return ""
    if isinstance(value, Iterable) and not isinstance(value, str):
        return "".join(map(_content, value))
    return text(value)


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{text(value)}"'
