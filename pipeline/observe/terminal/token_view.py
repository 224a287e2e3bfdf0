"""Completions with each token in the colour of its origin, or with marks where there is no colour.

This module knows no tokenizer: the caller passes the function that turns token ids into text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from rich.text import Text

from specbatch.schemas.records import Origin

Decode = Callable[[Sequence[Sequence[int]]], list[str]]  # token id lists to their texts

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
_INCOMPLETE = "\ufffd"


def token_pieces(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """The text each token adds; the pieces join into the text of the whole.

    A token that ends within a character adds nothing; the one that completes it adds it.
    """
    if not token_ids:
        return []
    prefixes = decode([token_ids[: i + 1] for i in range(len(token_ids))])
    whole, shown, pieces = prefixes[-1], "", []
    for prefix in prefixes[:-1]:
        stable = prefix.rstrip(_INCOMPLETE)
        grows = stable.startswith(shown) and whole.startswith(stable)
        pieces.append(stable[len(shown) :] if grows else "")
        shown = stable if grows else shown
    return [*pieces, whole[len(shown) :]]


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
