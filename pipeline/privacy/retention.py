"""Decides how much of a job's texts is kept, by its mode.

This is the only place that reduces texts before they go to the store, to other processes or to a
log.

    mode        text              token ids                     row id                 tag
    full        as it is          as they are                   as it is               as it is
    redacted    marks for finds   -1 where a find was           hashed, if a find      marks
    hash-only   none              -1 for all                    hashed                 hashed

The last two modes keep nothing that was not output: no rejected drafts, no most likely tokens.
Messages lose their quotes. Counts, origins, times, log-probabilities and costs stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from specbatch.pipeline.privacy.redactor import Redactor, Span, merged, replaced
from specbatch.schemas.errors import SpecbatchError
from specbatch.schemas.privacy import NOT_KEPT
from specbatch.schemas.records import CompletionRecord, RejectedRow

NO_WORDS = "its words are not kept"


class TextPolicy:
    """Keeps everything."""

    is_full = True

    def row_id(self, row_id: str) -> str:
        return row_id

    def tag(self, tag: str | None) -> str | None:
        return tag

    def rejected(self, row: RejectedRow) -> RejectedRow:
        return row

    def record(self, record: CompletionRecord, whole: str, decode: Decode) -> CompletionRecord:  # noqa: ARG002 - nothing is looked for
        """The kept part of a completion. `whole` is the text of all its tokens; the record's own
        may end before a stop string."""
        return record

    def words(self, message: str) -> str:
        """The kept part of a message of ours or of a user."""
        return message

    def error(self, error: BaseException) -> str:
        """The kept part of an error, for the store and logs."""
        said = str(error)
        return said if isinstance(error, SpecbatchError) else f"{type(error).__name__}: {said}"


class Redacted(TextPolicy):
    """Keeps texts with marks in place of personal data."""

    is_full = False

    def __init__(self, redactor: Redactor, hashed: Callable[[str, str], str]) -> None:
        """`hashed` makes a keyed hash of a text about something."""
        self._redactor = redactor
        self._hashed = hashed

    def row_id(self, row_id: str) -> str:
        return self._hashed(row_id, "row id") if self._redactor.spans(row_id) else row_id

    def tag(self, tag: str | None) -> str | None:
        return None if tag is None else self._redactor.redacted(tag)

    def rejected(self, row: RejectedRow) -> RejectedRow:
        row_id = None if row.row_id is None else self.row_id(row.row_id)
        return replace(row, row_id=row_id, reason=self.words(row.reason))

    def record(self, record: CompletionRecord, whole: str, decode: Decode) -> CompletionRecord:
        text, token_ids = record.text, record.token_ids
        if NOT_KEPT in token_ids:  # a policy has taken them out, and with them their text
            return self._less(record, self._redactor.redacted(text), token_ids)
        found = self._redactor.spans(whole)
        if text != whole:  # what was cut off may have hidden a find, or been part of one
            found = merged([*found, *self._redactor.spans(text)])
        if found:
            gone = tokens_in(token_places(token_ids, whole, decode), found, len(token_ids))
            token_ids = tuple(
                NOT_KEPT if place in gone else token for place, token in enumerate(token_ids)
            )
            text = replaced(text, found)
        return self._less(record, text, token_ids)

    def words(self, message: str) -> str:
        return self._redactor.without_quotes(message)

    def error(self, error: BaseException) -> str:
        return self.words(super().error(error))

    def _less(
        self, record: CompletionRecord, text: str, token_ids: tuple[int, ...]
    ) -> CompletionRecord:
        provenance = record.provenance
        return replace(
            record,
            row_id=self.row_id(record.row_id),
            tag=self.tag(record.tag),
            text=text,
            token_ids=token_ids,
            error=record.error and self.words(record.error),
            top_logprobs=None,
            provenance=replace(provenance, rejected=(NOT_KEPT,) * len(provenance.rejected)),
        )


class HashOnly(Redacted):
    """Keeps no text, and nothing that text could be recovered from."""

    def row_id(self, row_id: str) -> str:
        return self._hashed(row_id, "row id")

    def tag(self, tag: str | None) -> str | None:
        return None if tag is None else self._hashed(tag, "tag")

    def rejected(self, row: RejectedRow) -> RejectedRow:
        return replace(super().rejected(row), reason=NO_WORDS)

    def record(self, record: CompletionRecord, whole: str, decode: Decode) -> CompletionRecord:  # noqa: ARG002 - nothing is looked at
        return self._less(record, "", (NOT_KEPT,) * len(record.token_ids))

    def error(self, error: BaseException) -> str:
        if isinstance(error, SpecbatchError):  # a sentence of ours
            return self.words(str(error))
        return f"{type(error).__name__} ({NO_WORDS})"


KEEP_ALL = TextPolicy()


class Decoder(Protocol):
    """Converts token ids to text."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]: ...


def kept_records(
    policy: TextPolicy,
    records: Sequence[CompletionRecord],
    tokenizer: Decoder,
    texts: Sequence[str] | None = None,
) -> Sequence[CompletionRecord]:
    """Completions as the store keeps them. `texts`, if known, are those of all their tokens."""
    if policy.is_full:
        return records
    if texts is None:
        texts = tokenizer.decode_batch([record.token_ids for record in records])
    return [
        policy.record(record, whole, tokenizer.decode)
        for record, whole in zip(records, texts, strict=True)
    ]


Decode = Callable[[Sequence[int]], str]
Place = tuple[int, int]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how a character looks before its last byte
_MAX_PENDING = 16  # tokens that may wait for one character


def token_places(token_ids: Sequence[int], text: str, decode: Decode) -> list[Place] | None:
    """The characters that each token wrote; tokens that form one character share it.

    None if decoding a few tokens at a time does not give the text. Callers must then assume that
    any token wrote any character. Takes time in proportion to the text.
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
    """The tokens with a character in a span; all tokens if places are unknown."""
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
