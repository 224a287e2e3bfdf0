"""Completions with each token in the colour of its origin, or with marks where there is no colour.

This module knows no tokenizer: the caller passes the function that turns token ids into text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from rich.text import Text

from specbatch.schemas.records import Origin

Decode = Callable[[Sequence[int]], str]  # token ids to their text

STYLES = {
    Origin.ACCEPTED: "green",
    Origin.CORRECTED: "bold red",
    Origin.PLAIN: "dim",
    Origin.BONUS: "dim",
}
MARKS = {Origin.ACCEPTED: ("«", "»"), Origin.CORRECTED: ("[", "]")}
MEANING = {
    Origin.ACCEPTED: "drafted and accepted",
    Origin.CORRECTED: "corrected by the verifier",
    Origin.PLAIN: "the verifier's own",
}
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how a character looks before its last byte
_MOST_PENDING = 16  # tokens that may wait for one character


def token_pieces(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """The text each token adds; the pieces join into the text of the whole.

    A token that ends within a character adds nothing; the one that completes it adds it. Each piece
    is decoded with a few tokens before it: whole prefixes would take quadratic time.
    """
    pieces: list[str] = []
    begin = read = 0  # where the context begins, and where what is not shown yet does
    for stop in range(1, len(token_ids) + 1):
        known = decode(token_ids[begin:read])
        fresh = decode(token_ids[begin:stop])[len(known) :]
        waits = stop - read < _MOST_PENDING and stop < len(token_ids)
        if fresh.endswith(_UNFINISHED) and waits:
            continue  # the next token may complete the character
        pieces += [""] * (stop - read - 1) + [fresh]
        if fresh:
            begin = read
        read = stop
    return pieces


def token_text(pieces: Sequence[str], origins: Sequence[int], color: bool) -> Text:
    """The pieces as one text: coloured, or with marks around runs of the same origin."""
    text = Text()
    pairs = zip(pieces, origins, strict=True)
    for origin, run in groupby(pairs, key=lambda pair: Origin(pair[1])):
        joined = "".join(piece for piece, _ in run)
        if color:
            text.append(joined, STYLES[origin])
        else:
            before, after = MARKS.get(origin, ("", ""))
            text.append(f"{before}{joined}{after}")
    return text


def legend(color: bool) -> Text:
    """What the colours or marks mean."""
    text = Text("tokens: ")
    for number, (origin, meaning) in enumerate(MEANING.items()):
        text.append(", " if number else "")
        text.append_text(token_text([meaning], [origin], color))
    return text
