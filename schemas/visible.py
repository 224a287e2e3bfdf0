"""Makes users' text safe to print on a terminal, by escaping what a terminal would obey.

Control characters move cursors, set titles and hide lines; bidirectional controls reorder words.
Row ids, texts, names, paths and errors may contain both. Everything printed passes through here
once, at the edge; files keep the original text.
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
    """The text with everything that a terminal obeys escaped, as `\\x1b` or `\\u202e`."""
    return _OBEYED.sub(_escaped, text)


def one_line(text: str) -> str:
    """The same for a sentence; line ends that it quotes are escaped too."""
    return visible(text).replace("\n", "\\n")


def visible_json(value: Any, **options: Any) -> str:
    """A value as JSON on one line, in which such characters stand as `\\u202e`."""
    said = orjson.dumps(value, **options).decode()
    return _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", said)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
