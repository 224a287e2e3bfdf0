"""Checks rows: a raw row becomes a `PromptRow`, or a `RejectedRow` with its reason.

    code                   meaning
    null_prompt            the prompt is null or absent
    null_column            a column that the template names is null or absent
    template_failed        the template cannot be rendered with the row's columns
    empty_prompt           no text, or no tokens
    invalid_utf8           text bytes that are not UTF-8, or text with a lone surrogate
    bad_json               a line (or the body) is not a JSON object
    bad_csv                a row is not CSV, or has more or fewer cells than the header
    wrong_type             the prompt is neither text, token ids nor messages (JSONL)
    bad_messages           not a list of {role, content} with text, or refused by the template
    unknown_role           a role other than system, user, assistant, tool, developer
    no_chat_template       messages, but the model's tokenizer has no template
    bad_token_id           a token id outside the vocabulary
    too_long               does not leave room for one token, or above max_prompt_tokens; or a cell
                           or line of more bytes than are read
    unreadable             its part of the file cannot be decoded within the memory for that, or
                           Python does not have a value of it, such as a date after the year 9999
    bad_id                 an id above 512 characters, with a NUL, or too large a number to be exact
    duplicate_id           an earlier row has the id; the first one counts
    missing_id             the output's table merges rows by ids, and the row has none
    bad_seed               not an integer in [0, 2**63)
    bad_parameter          a request value out of range
    bad_response_format    one that cannot be compiled, with the path of the fault
    bad_tools              tools whose parameters cannot be, likewise
    no_tool_template       tools, or calls of them, which the model's chat template does not show
    unsupported_parameter  a request field that cannot be honoured

A prompt whose `max_tokens` reaches over the context is fine: the engine stops there with finish
reason `length`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from specbatch.pipeline.inputs.contract import NO_ID, RawBatch, RawRow, RowError
from specbatch.pipeline.inputs.messages import messages_of
from specbatch.pipeline.inputs.overrides import (
    Overrides,
    check_vocabulary,
    read_body,
    read_column,
    read_seed,
)
from specbatch.pipeline.inputs.prompt_template import PromptTemplate
from specbatch.pipeline.inputs.tokenizer import TextTokenizer, portions
from specbatch.schemas.errors import SpecError
from specbatch.schemas.records import PromptRow, RejectedRow, SamplingParams
from specbatch.schemas.seeds import derive_seed
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.tools import tools_in_use

_MAX_ID_CHARS = 512
# The beginning of a text that is far too long proves it, so the rest is not tokenised. Tokens at
# the cut may differ from those of the whole text, but not half of them.
_CHARS_PER_TOKEN = 16
_SURELY = 2  # times the allowed number of tokens
_CHARS_AT_ONCE = 32 << 20  # of prompts that templates have made
_FORM_FIELDS = {"response_format", "tools", "tool_choice", "parallel_tool_calls"}
_EXACT_BELOW = 2.0**53  # larger ids that were read as floats are not distinct


@dataclass(slots=True)
class _Draft:
    """A row being checked: `text` still to be tokenised, or `ids`, or a problem."""

    row_id: str | None
    text: str | None = None
    special: bool = True  # whether the tokenizer adds its own special tokens
    ids: Sequence[int] | None = None
    seed: int | None = None
    tag: str | None = None
    n: int = 1
    overrides: dict[str, Any] = field(default_factory=dict)
    problem: tuple[str, str] | None = None


class RowChecker:
    """Checks and tokenises batches in input order; remembers every id it has met."""

    def __init__(
        self,
        spec: JobSpec,
        tokenizer: TextTokenizer,
        context_tokens: int,
        vocab_size: int,
        *,
        today: float,
    ):
        """`today` (seconds since the epoch): for chat templates that write a date, the job's."""
        self._today = today
        self._spec = spec
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens
        self._vocab_size = vocab_size
        self._ids = IdSet()
        self._most_tokens = min(context_tokens, spec.max_prompt_tokens or context_tokens)
        self._most_chars = _CHARS_PER_TOKEN * _SURELY * (self._most_tokens + 1)
        check_vocabulary(spec.sampling, vocab_size)
        try:
            self._check_form(spec.sampling.params())
        except RowError as error:
            raise SpecError(f"job spec: sampling: {error}") from None
        if spec.input.makes_chats and not tokenizer.has_chat_template:
            raise SpecError(
                f"job spec: field `input.{'system' if spec.input.system else 'template'}` makes "
                f"chats, and the tokenizer of {tokenizer.name} has no chat template: use a model "
                "with one, or a template of plain text"
            )
        self._template = PromptTemplate(spec.input) if spec.input.is_templated else None
        self._needs_ids = _needs_ids(spec)

    def remember(self, earlier_ids: Iterable[list[Any]]) -> int:
        """Learn the ids of rows read before a resume. Returns the number of rows."""
        row = 0
        for batch in earlier_ids:
            self._ids.add([_row_id(value, row) for value in batch if not _is_absent(value)])
            row += len(batch)
        return row

    def check(
        self, batch: RawBatch, first_row: int, has_ids: bool = True
    ) -> list[PromptRow | RejectedRow]:
        """One result per row, in order; `first_row` is the row_index of the first."""
        results: list[PromptRow | RejectedRow] = []
        for drafts in self._runs(batch, first_row):
            part = batch.part(len(results), len(results) + len(drafts))
            results += self._checked(drafts, part, first_row + len(results), has_ids)
        return results

    def _runs(self, batch: RawBatch, first_row: int) -> Iterator[list[_Draft]]:
        """The drafts of the batch, in runs for which templates made about `_CHARS_AT_ONCE`
        characters: a small row may have a long prompt."""
        drafts: list[_Draft] = []
        chars = 0
        for row_index, raw in enumerate(batch.rows, first_row):
            draft = self._draft(raw, batch, row_index)
            made = 0 if draft.text is None or draft.text is raw.prompt else len(draft.text)
            if drafts and chars + made > _CHARS_AT_ONCE:
                yield drafts
                drafts, chars = [], 0
            drafts.append(draft)
            chars += made
        yield drafts

    def _checked(
        self, drafts: list[_Draft], batch: RawBatch, first_row: int, has_ids: bool
    ) -> list[PromptRow | RejectedRow]:
        if has_ids:
            self._mark_duplicates(drafts, batch, first_row)
        for special in (True, False):
            self._tokenise([d for d in drafts if d.text is not None and d.special is special])
        return [self._verdict(draft, first_row + i) for i, draft in enumerate(drafts)]

    # 1) everything that can be checked before tokenising
    def _draft(self, raw: RawRow, batch: RawBatch, row_index: int) -> _Draft:
        draft = _Draft(None, n=self._spec.sampling.n)
        if raw.is_nameless:
            draft.problem = raw.problem
            return draft
        draft.row_id = _row_id(raw.id, row_index)
        try:
            if raw.problem:
                raise RowError(*raw.problem)
            draft.row_id = _checked_id(draft, raw.id)
            if self._needs_ids and _is_absent(raw.id):
                raise RowError("missing_id", "the row has no id, by which output.table merges")
            draft.tag = _tag(raw.tag)
            draft.seed = read_seed(raw.seed)
            if raw.body is not None:
                self._take(draft, read_body(raw.body, self._spec.sampling, self._vocab_size))
            if raw.sampling is not None:
                self._take(draft, read_column(raw.sampling, self._spec.sampling, self._vocab_size))
            if self._template is None:
                self._read_prompt(draft, raw.prompt, batch.kind)
            else:
                self._read_prompt(draft, *self._template.made(raw))
        except RowError as error:
            draft.problem = (error.code, str(error))
            draft.text = draft.ids = None
        except RecursionError:
            draft.problem = ("wrong_type", "a value of the row is nested too deeply")
            draft.text = draft.ids = None
        return draft

    def _take(self, draft: _Draft, read: Overrides) -> None:
        draft.overrides, draft.n, seed = read
        draft.seed = seed if seed is not None else draft.seed
        if not _FORM_FIELDS.isdisjoint(draft.overrides):
            self._check_form(self._spec.sampling.params(draft.overrides))

    def _check_form(self, params: SamplingParams) -> None:
        if not params.form:
            return
        try:
            self._tokenizer.grammar(params.form, self._vocab_size)
        except ValueError as error:
            if params.response_format:
                raise RowError("bad_response_format", f"response_format {error}") from None
            raise RowError("bad_tools", f"tools {error}: simplify them") from None

    def _tools(self, draft: _Draft) -> list[dict[str, Any]] | None:
        """What the chat template shows of them."""
        own = (
            draft.overrides.get(name, getattr(self._spec.sampling, name))
            for name in ("tools", "tool_choice")
        )
        tools = tools_in_use(*own)
        return orjson.loads(tools) if tools else None

    def _read_prompt(self, draft: _Draft, prompt: Any, kind: str) -> None:
        if prompt is None:
            raise RowError("null_prompt", "the prompt is null")
        if isinstance(prompt, bytes):
            raise RowError("invalid_utf8", "the prompt is not valid UTF-8")
        if kind == "auto":
            kind = _kind_of(prompt)
        if kind == "messages":
            draft.text, draft.special = self._rendered(draft, prompt), False
        elif kind == "token_ids":
            draft.ids = self._checked_ids(prompt)
        elif not isinstance(prompt, str):
            raise RowError("wrong_type", f"the prompt is a {type(prompt).__name__}, not text")
        else:
            draft.text = prompt
        if draft.text == "" or (draft.ids is not None and len(draft.ids) == 0):
            raise RowError("empty_prompt", "the prompt is empty")
        if draft.text is not None and not _is_utf8(draft.text):
            raise RowError("invalid_utf8", "the prompt has half a character (a lone surrogate)")

    def _rendered(self, draft: _Draft, prompt: Any) -> str:
        tools = self._tools(draft)
        return self._tokenizer.render(messages_of(prompt), tools, today=self._today)

    def _checked_ids(self, prompt: Any) -> Sequence[int]:
        if not isinstance(prompt, list):
            raise RowError("wrong_type", f"the prompt is a {type(prompt).__name__}, not token ids")
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RowError("bad_token_id", f"token id {token!r:.50} is not an integer")
        if prompt and not (min(prompt) >= 0 and max(prompt) < self._vocab_size):
            wrong = next(t for t in prompt if not 0 <= t < self._vocab_size)
            raise RowError("bad_token_id", self._outside(wrong))
        return prompt

    def _outside(self, token: int) -> str:
        return f"token id {token} is outside the model's vocabulary of {self._vocab_size}"

    # 2) ids must be new, whatever else is wrong with the row
    def _mark_duplicates(self, drafts: list[_Draft], batch: RawBatch, first_row: int) -> None:
        # A row without an id is named by its number, which is unique, so it needs no check.
        named = [i for i, raw in enumerate(batch.rows) if not _is_absent(raw.id)]
        ids = [_row_id(batch.rows[i].id, first_row + i) for i in named]
        for i, row_id, seen in zip(named, ids, self._ids.add(ids), strict=True):
            draft = drafts[i]
            if seen and draft.problem is None:
                draft.problem = ("duplicate_id", f"an earlier row has the id {row_id!r:.100}")
                draft.text = None

    # 3) one tokenizer call for many rows; the same text once
    def _tokenise(self, drafts: list[_Draft]) -> None:
        by_text: dict[str, list[_Draft]] = {}
        for draft in drafts:
            by_text.setdefault(draft.text or "", []).append(draft)
            draft.text = None
        special = drafts[0].special if drafts else True
        texts = list(by_text)
        for part in portions([text[: self._most_chars] for text in texts]):
            for begin, ids in zip(part, self._tokenizer.encode_batch(part, special), strict=True):
                text = texts.pop(0)
                is_whole = len(begin) == len(text)
                if not is_whole and len(ids) <= _SURELY * (self._most_tokens + 1):
                    ids, is_whole = self._tokenizer.encode_batch([text], special)[0], True
                problem = self._length_problem(ids, is_whole)
                for draft in by_text.pop(text):
                    draft.problem, draft.ids = problem, None if problem else ids

    # 4) lengths, then the result
    def _verdict(self, draft: _Draft, row_index: int) -> PromptRow | RejectedRow:
        problem = draft.problem
        if problem is None:
            problem = self._length_problem(draft.ids or ())
        if problem or draft.row_id is None or draft.ids is None:
            code, reason = problem or ("empty_prompt", "the prompt is empty")
            return RejectedRow(row_index, draft.row_id, code, reason)
        seed = draft.seed
        if seed is None:
            seed = derive_seed(self._spec.sampling.seed, draft.row_id)
        return PromptRow(
            row_index, draft.row_id, tuple(draft.ids), seed, draft.tag, draft.n, draft.overrides
        )

    def _length_problem(self, ids: Sequence[int], is_whole: bool = True) -> tuple[str, str] | None:
        if not ids:
            return "empty_prompt", "the prompt has no tokens"
        limit = self._spec.max_prompt_tokens
        count = str(len(ids)) if is_whole else f"more than {len(ids) - 1}"
        if limit is not None and len(ids) > limit:
            return "too_long", f"the prompt has {count} tokens; max_prompt_tokens is {limit}"
        if len(ids) + 1 > self._context_tokens:
            return (
                "too_long",
                f"the prompt has {count} tokens; with one generated token it exceeds the "
                f"model's context of {self._context_tokens}",
            )
        if self._tokenizer.vocab_size > self._vocab_size and max(ids) >= self._vocab_size:
            return "bad_token_id", self._outside(max(ids))
        return None


def _needs_ids(spec: JobSpec) -> bool:
    """Whether a row without an id would replace another job's row in the output's table."""
    if spec.output.table is None or spec.output.table.mode != "merge":
        return False
    from specbatch.schemas.arrow import output_schema

    return spec.output.table.needs_ids(output_schema(spec.output.best_by is not None).names)


def _is_absent(value: Any) -> bool:
    """Whether the row has no id of its own."""
    return value is None or value == "" or value == NO_ID


def _row_id(value: Any, row_index: int) -> str:
    """The row's id as text, or its number if it has none."""
    if _is_absent(value):
        return str(row_index)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else _plain_text(value)


def _checked_id(draft: _Draft, raw_id: Any) -> str:
    row_id = draft.row_id or ""
    if isinstance(raw_id, bytes):
        raise RowError("invalid_utf8", "the id is not valid UTF-8")
    if isinstance(raw_id, float) and abs(raw_id) >= _EXACT_BELOW:
        raise RowError("bad_id", f"the id {raw_id!r} is not exact: an id this large must be text")
    if len(row_id) > _MAX_ID_CHARS or "\0" in row_id:
        # Databases refuse such text, and the quarantined row must be storable too.
        draft.row_id = row_id[:_MAX_ID_CHARS].replace("\0", "\N{REPLACEMENT CHARACTER}")
        raise RowError("bad_id", f"an id has at most {_MAX_ID_CHARS} characters and no NUL")
    return row_id


def _tag(value: Any) -> str | None:
    """The tag as text. Tags only label rows, so a strange one is shown, never refused."""
    if value is None:
        return None
    text = value.decode(errors="replace") if isinstance(value, bytes) else _plain_text(value)
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _plain_text(value: Any) -> str:
    if isinstance(value, dict | list):
        try:
            return orjson.dumps(value, default=str).decode()
        except TypeError:  # orjson reads deeper values than it writes
            return "(nested too deeply)"
    return str(value)


def _is_utf8(text: str) -> bool:
    """Whether it can be written as UTF-8. JSON in JSON, or a template, can bring half a pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind_of(prompt: Any) -> str:
    """The kind of prompt that a JSON value is."""
    if isinstance(prompt, list) and any(isinstance(item, dict) for item in prompt):
        return "messages"
    return "token_ids" if isinstance(prompt, list) else "text"


Hashes = NDArray[np.uint64]


class IdSet:
    """A set of ids that reports which of the added ids it already has.

    It keeps 64-bit BLAKE2b hashes in a few sorted runs and merges them as they grow: 8 bytes per id
    at rest, 16 during the largest merge. Two different ids collide with probability n²/2⁶⁵ (3·10⁻⁸
    for a million ids); the second one is then refused as a duplicate, never mixed up silently.
    """

    def __init__(self) -> None:
        self._runs: list[Hashes] = []  # sorted, each more than twice as long as the next

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def add(self, ids: Sequence[str]) -> list[bool]:
        """Add ids. True for each that was in the set, or earlier in `ids`."""
        if not ids:
            return []
        hashes = _hashes(ids)
        seen = np.ones(len(hashes), dtype=bool)
        unique, first = np.unique(hashes, return_index=True)
        known = np.zeros(len(unique), dtype=bool)
        for run in self._runs:
            at = np.minimum(np.searchsorted(run, unique), len(run) - 1)
            known |= run[at] == unique
        seen[first[~known]] = False
        if not known.all():
            self._append(unique[~known])
        return [bool(flag) for flag in seen]

    def _append(self, run: Hashes) -> None:
        self._runs.append(run)
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            last, previous = self._runs.pop(), self._runs.pop()
            merged = np.concatenate([previous, last])
            merged.sort()
            self._runs.append(merged)


def _hashes(ids: Sequence[str]) -> Hashes:
    digests = b"".join(blake2b(text.encode(), digest_size=8).digest() for text in ids)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)
