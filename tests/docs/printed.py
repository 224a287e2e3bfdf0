"""Whether a command printed what its page shows: the same lines, with figures of its own.

A line of the page must come in the output, in order. Numbers, ids, times and the lines of boxes are
not compared; `…` or `...` stands for anything.
"""

from __future__ import annotations

import re

_BOXES = re.compile(r"[│┌┐└┘├┤┬┴┼─╭╮╰╯━╸╺┃┏┓┗┛┡┩╇]+")
_ID = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{6,}\b")
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?%?×?")
_GAP = re.compile(r"…|\.\.\.")


def plain(line: str) -> str:
    """A line without what differs from run to run."""
    line = _BOXES.sub(" ", line)
    line = _NUMBER.sub("#", _ID.sub("ID", line))
    return " ".join(line.split())


def missing(shown: str, printed: str) -> list[str]:
    """Lines of the page that the output has not, at least not where they should come."""
    lines = [plain(line) for line in printed.splitlines()]
    at, lost = 0, []
    for line in shown.splitlines():
        wanted = plain(line)
        if not wanted or not _GAP.sub("", wanted).strip():
            continue
        parts = [re.escape(" ".join(part.split())) for part in _GAP.split(wanted)]
        pattern = re.compile(r"\s*.*\s*".join(parts))
        here = next((i for i in range(at, len(lines)) if pattern.fullmatch(lines[i])), None)
        if here is None:
            lost.append(line)
        else:
            at = here + 1
    return lost
