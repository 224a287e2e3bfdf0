"""Text of users' as a terminal may show it: what it would obey is spelled out.

Control characters move cursors, set titles and hide lines; bidirectional controls show words in
another order than they have. Both come in with row ids, texts, names, paths and errors that quote
them. Whoever prints passes everything through here, once, at the edge; files keep what is true.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

# C0 but the line's end, DEL and C1; bidirectional controls and separators of lines; halves of
# characters, which no terminal's encoding has.
_CONTROLS = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_OBEYED = re.compile(f"[\x00-\x09\x0b-\x1f{_CONTROLS}\ud800-\udfff]")
_IN_JSON = re.compile(f"[{_CONTROLS}]")


def visible(text: str) -> str:
    """The text with everything that a terminal obeys as an escape: `\\x1b`, `\\u202e`."""
    return _OBEYED.sub(_escaped, text)


def one_line(text: str) -> str:
    """The same of a sentence, in which a line's end came in with what it quotes."""
    return visible(text).replace("\n", "\\n")


def visible_json(value: Any, **options: Any) -> str:
    """A value as JSON on one line, in which such characters stand as `\\u202e`."""
    said = orjson.dumps(value, **options).decode()
    return _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", said)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
