"""Which characters of a text each of its tokens wrote. Knows nothing of tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specbatch.pipeline.privacy.redactor import Span

Decode = Callable[[Sequence[int]], str]
Place = tuple[int, int]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how a character looks before its last byte
_MAX_PENDING = 16  # tokens that may wait for one character


def token_places(token_ids: Sequence[int], text: str, decode: Decode) -> list[Place] | None:
    """The characters of each token, those that make one character together the same ones.

    None where decoding a few tokens at a time does not add up to the text: who asks must take every
    token for any character then. Takes time in proportion to the text.
    """
    places: list[Place] = []
    begin = 0  # of the tokens that are decoded again, for context
    read = 0  # tokens whose characters are known
    at = 0  # characters of these
    for stop in range(1, len(token_ids) + 1):
        known = decode(token_ids[begin:read])
        window = decode(token_ids[begin:stop])
        if not window.startswith(known.rstrip(_UNFINISHED)):
            return None
        fresh = window[len(known) :]
        last = stop == len(token_ids)
        if fresh.endswith(_UNFINISHED) and stop - read < _MAX_PENDING and not last:
            continue  # the next token may complete it
        if not text.startswith(fresh, at):
            return None
        places += [(at, at + len(fresh))] * (stop - read)
        at += len(fresh)
        if fresh:
            begin = read
        read = stop
    return places if at == len(text) else None


def tokens_in(places: Sequence[Place] | None, spans: Sequence[Span], count: int) -> set[int]:
    """The tokens of which a character lies in a span; all of them where places are unknown."""
    if places is None:
        return set(range(count))
    found: set[int] = set()
    number = 0
    for span in spans:
        while number < len(places) and places[number][1] <= span.start:
            number += 1
        for token in range(number, len(places)):
            start, stop = places[token]
            if start >= span.stop:
                break
            if stop > span.start:
                found.add(token)
    return found
