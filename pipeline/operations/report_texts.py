"""The texts of a report: outputs token by token, excerpts, row ids.

The store's texts already follow their tenant's privacy mode. If the tenant's mode is stricter by
now, this module omits more. It needs no torch: pieces of text come from the verifier's
`tokenizer.json`, read by `tokenizers`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.observe.report.facts import ShownRow, ShownToken
from specbatch.pipeline.observe.terminal.token_view import token_pieces
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.schemas.errors import ObjectError, SpecbatchError
from specbatch.schemas.job_figures import RowFigures
from specbatch.schemas.privacy import NOT_KEPT, PrivacyMode
from specbatch.schemas.records import CompletionRecord, JobRow, Origin, PromptRow
from specbatch.schemas.settings import Settings

log = logging.getLogger(__name__)

MOST_TOKENS = 2000  # of one output
MOST_TOKENS_OF_ALL = 24_000
EXCERPT = 160  # characters

Pieces = Callable[[Sequence[int]], list[str]]  # the text that each token adds


def why_no_texts(job: JobRow, asked: PrivacyMode, wanted: bool) -> str | None:
    """The reason why texts are hidden; None: they are shown. `asked`: the tenant's mode now."""
    if not wanted:
        return "Texts were left out of this report on request."
    if job.purged_at is not None:
        return "This job was purged: its texts are deleted, its figures are kept."
    if job.privacy is PrivacyMode.HASH_ONLY:
        return "This tenant's texts are not kept (hash-only): row ids and tags are keyed hashes."
    if asked.strictness > job.privacy.strictness:
        return (
            f"The tenant's privacy is {asked} now, and this job was kept {job.privacy} before: "
            "no texts are shown."
        )
    return None


def make_pieces(ref: str) -> Pieces | None:
    """Pieces by the verifier's tokenizer; None if it or its package is missing."""
    path = _tokenizer_file(ref)
    if path is None or find_spec("tokenizers") is None:
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more special
        log.info("%s cannot be read: %s", path, error)
        return None
    added = tokenizer.get_added_tokens_decoder().items()
    special = {number: one.content for number, one in added if one.special}

    def pieces(token_ids: Sequence[int]) -> list[str]:
        found = token_pieces(token_ids, lambda ids: tokenizer.decode(list(ids)))
        return [
            piece or special.get(token, "") for token, piece in zip(token_ids, found, strict=True)
        ]

    return pieces


def _tokenizer_file(ref: str) -> Path | None:
    """The file in the model's folder, or in the cache of an earlier download."""
    path = Path(ref) / "tokenizer.json"
    if path.is_file():
        return path
    if Path(ref).is_absolute() or find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(ref, "tokenizer.json")
    except ValueError:  # not a valid model name there
        return None
    return Path(found) if isinstance(found, str) else None


@dataclass(slots=True)
class Texts:
    """Reads the shown texts of completions. `hidden`: why no texts are shown, if so."""

    store: Store
    settings: Settings
    job: JobRow
    hidden: str | None
    words: bool  # whether tags and reasons may be shown
    pieces: Pieces | None
    budget: int = MOST_TOKENS_OF_ALL
    out_of_reach: bool = False  # the prompts' store: do not wait for the other prompts

    @classmethod
    def of(cls, store: Store, settings: Settings, job: JobRow, wanted: bool) -> Texts:
        asked = Privacy.of_settings(settings).mode_of(job.tenant)
        hidden = why_no_texts(job, asked, wanted)
        pieces = None if hidden is not None else make_pieces(job.verifier)
        words = asked.strictness <= job.privacy.strictness
        return cls(store, settings, job, hidden, words, pieces)

    def templates(self) -> list[tuple[str, str]]:
        """What the prompts are made with, by name."""
        if self.hidden is not None:
            return []
        return Privacy.of_settings(self.settings).templates(self.job)

    def outlier(self, row: RowFigures) -> ShownRow:
        shown = ShownRow(row, row.tag if self.words else None)
        record = self._record(row) if self.hidden is None else None
        if record is None:
            return shown
        return replace(
            shown,
            row_id=record.row_id,
            prompt=_excerpt(self._prompt(row)),
            output=_excerpt(record.text),
        )

    def output(self, row: RowFigures) -> ShownRow | None:
        """The output of a row; None if it cannot be read."""
        record = self._record(row) if self.budget > 0 else None
        if record is None:
            return None
        tokens = self._tokens(record, min(MOST_TOKENS, self.budget))
        self.budget -= len(tokens)
        return ShownRow(
            row,
            row.tag if self.words else None,
            row_id=record.row_id if self.hidden is None else None,
            prompt=self._prompt(row) if self.hidden is None else None,
            tokens=tokens,
        )

    def _record(self, row: RowFigures) -> CompletionRecord | None:
        """The record; None without the right or key to read it, which the report then says."""
        try:
            kept = self.store.kept_one(self.job.job_id, row.row_index, row.sample_index)
        except SpecbatchError as error:
            self.hidden = f"Texts cannot be read here: {error}."
            return None
        return None if kept is None else kept.record

    def _tokens(self, record: CompletionRecord, most: int) -> tuple[ShownToken, ...]:
        origins = record.origins[:most]
        logprobs: list[float | None] = [*record.logprobs[:most]]
        logprobs += [None] * (len(origins) - len(logprobs))
        ids = list(record.token_ids[:most])
        ids += [NOT_KEPT] * (len(origins) - len(ids))
        texts = [None] * len(ids) if self.hidden is not None else list(self._texts(ids))
        return tuple(
            ShownToken(text, Origin(origin), logprob)
            for text, origin, logprob in zip(texts, origins, logprobs, strict=True)
        )

    def _texts(self, ids: Sequence[int]) -> Iterator[str | None]:
        """The text of each token: None if it is not kept, its number without a tokenizer."""
        for is_kept, run in groupby(ids, key=lambda token: token != NOT_KEPT):
            tokens = list(run)
            if not is_kept:
                yield from [None] * len(tokens)
            elif self.pieces is None:
                yield from (f"{token} " for token in tokens)
            else:
                yield from self.pieces(tokens)

    def _prompt(self, row: RowFigures) -> str | None:
        """The prompt as text, if its file can be read here and the tenant keeps all texts."""
        if not self.job.privacy.is_full or self.pieces is None or self.out_of_reach:
            return None
        found = self._prompt_row(row)
        return None if found is None else "".join(self.pieces(found.prompt_ids[-MOST_TOKENS:]))

    def _prompt_row(self, row: RowFigures) -> PromptRow | None:
        from specbatch.pipeline.operations.tools import prompt_row

        try:
            where = self.store.prompts_of(self.job.job_id, row.group_index)
            if where is None:
                return None
            return prompt_row(self.settings, self.job, where, row.row_index)
        except SpecbatchError as error:
            log.info("a prompt is out of reach: %s", error)
            self.out_of_reach = isinstance(error, ObjectError) and error.passing
            return None


def _excerpt(text: str | None) -> str | None:
    if text is None:
        return None
    words = " ".join(text.split())
    return words if len(words) <= EXCERPT else words[: EXCERPT - 1] + "…"
