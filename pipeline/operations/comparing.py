"""Compares the outputs of two jobs row by row, in memory that does not grow with them.

Rows belong together by id and sample; rows without an id, by their number. Two outputs of the same
input are in the same order and are read side by side. Rows that come in another order wait in a
temporary SQLite database, which SQLite moves to disk as it grows.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

import orjson

from specbatch.pipeline.outputs.rows import ComparedRow, logprobs, token_ids
from specbatch.schemas.errors import UsageError
from specbatch.schemas.prompt_places import in_brief
from specbatch.schemas.records import JobRow
from specbatch.schemas.vllm_proposer import vllm_proposer_in

CONTEXT = 40  # characters of a text that are shown from the first difference on
# What decides a completion, beside the model: fields of a spec.
_DECIDING = ("sampling", "input", "engine")
_LIKEWISE = ("verification",)  # of `speculation`
_TEMPLATES = ("input.template", "input.system")
_CACHE_KIB = 16 << 10

_FIELDS = tuple(one.name for one in fields(ComparedRow))
_COLUMNS = ", ".join(_FIELDS)
_PLACES = ", ".join("?" for _ in _FIELDS)
_values = attrgetter(*_FIELDS)


class Difference(NamedTuple):
    """How two completions of a row differ first. `left` and `right` are None past an end."""

    row_id: str | None
    row_index: int  # in the first job
    sample_index: int
    what: str  # token, character, finish_reason, error, log-probability or text
    at: int | None  # number of the token or character, from 0; None: of the whole row
    left: Any
    right: Any
    left_text: str | None  # from the first different character on, cut
    right_text: str | None


def in_brief_of(job: JobRow) -> list[tuple[str, str]]:
    """A job's templates, each on a line."""
    return in_brief(job.spec)


@dataclass(slots=True)
class Written:
    """What one job wrote in the rows that both have: sums that do not need equal outputs."""

    completions: int = 0
    tokens: int = 0
    logprob: float = 0.0  # of all tokens that have one …
    logprobs: int = 0  # … and how many do
    reasons: Counter[str] = field(default_factory=Counter)  # how completions ended

    def see(self, row: ComparedRow) -> None:
        self.completions += 1
        self.tokens += len(token_ids(row))
        found = logprobs(row)
        self.logprob += sum(found)
        self.logprobs += len(found)
        self.reasons[row.finish_reason] += 1

    @property
    def mean_tokens(self) -> float:
        """Of a completion."""
        return self.tokens / self.completions if self.completions else 0.0

    @property
    def mean_logprob(self) -> float | None:
        """Of a token; None without log-probabilities."""
        return self.logprob / self.logprobs if self.logprobs else None


@dataclass(frozen=True, slots=True)
class Thresholds:
    """By how much the second job may differ from the first. None: by anything."""

    different: float | None = None  # share of all rows
    length: float | None = None  # of the mean number of tokens, as a share of it
    logprob: float | None = None  # by which the mean log-probability of a token may be lower

    @property
    def are_any(self) -> bool:
        return (self.different, self.length, self.logprob) != (None, None, None)


@dataclass(slots=True)
class Comparison:
    """The counts of a comparison, and the first few differences."""

    same: int = 0
    differ: int = 0
    only_left: int = 0
    only_right: int = 0
    differences: list[Difference] = field(default_factory=list)
    ids_only_left: list[str] = field(default_factory=list)
    ids_only_right: list[str] = field(default_factory=list)
    left: Written = field(default_factory=Written)
    right: Written = field(default_factory=Written)

    @property
    def different_share(self) -> float:
        """Rows that differ or have no partner, as a share of all."""
        apart = self.differ + self.only_left + self.only_right
        return apart / (apart + self.same) if apart else 0.0

    def exceeded(self, allowed: Thresholds) -> list[str]:
        """What differs by more, a sentence each.

        Raises `UsageError` for log-probabilities that a job does not have.
        """
        said = []
        if allowed.different is not None and self.different_share > allowed.different:
            said.append(
                f"{self.different_share:.1%} of the rows differ, more than {allowed.different:.1%}"
            )
        one, other = self.left.mean_tokens, self.right.mean_tokens
        if allowed.length is not None and abs(other - one) > allowed.length * one:
            said.append(
                f"a completion has {other:.1f} tokens instead of {one:.1f}: more than "
                f"{allowed.length:.1%} apart"
            )
        if allowed.logprob is not None:
            before, after = self.left.mean_logprob, self.right.mean_logprob
            if before is None or after is None:
                raise UsageError(
                    "there are no log-probabilities to compare in one of the jobs: submit both "
                    "with `--logprobs`, or leave out --max-logprob"
                )
            if before - after > allowed.logprob:
                said.append(
                    f"a token's log-probability is {after:.4f} instead of {before:.4f}: lower by "
                    f"more than {allowed.logprob:g}"
                )
        return said

    @property
    def equal(self) -> bool:
        return not (self.differ or self.only_left or self.only_right)


def compare(
    left: Iterable[ComparedRow], right: Iterable[ComparedRow], most: int = 10
) -> Comparison:
    """Compare all rows; keep at most so many examples of each kind of difference."""
    found = Comparison()
    with closing(_Waiting()) as on_left, closing(_Waiting()) as on_right:
        for one, other in zip_longest(left, right):
            if one and other and _belong_together(one, other, on_left, on_right):
                _note(found, one, other, most)
                continue
            if one is not None:
                if (partner := on_right.take(_key(one))) is not None:
                    _note(found, one, partner, most)
                else:
                    on_left.add(one)
            if other is not None:
                if (partner := on_left.take(_key(other))) is not None:
                    _note(found, partner, other, most)
                else:
                    on_right.add(other)
        found.only_left, found.only_right = len(on_left), len(on_right)
        found.ids_only_left, found.ids_only_right = on_left.names(most), on_right.names(most)
    found.differences.sort(key=lambda one: (one.row_index, one.sample_index))
    return found


def difference(left: ComparedRow, right: ComparedRow) -> Difference | None:
    """The first difference of two completions; None if they are equal, bit for bit."""
    if _decided(left) == _decided(right) and not _other_logprobs(left, right):
        return None
    at, what, values = _first(left, right)
    place = first_place(left.text or "", right.text or "")
    has_texts = left.text is not None and right.text is not None and left.text != right.text
    texts = [one[place : place + CONTEXT] for one in (left.text or "", right.text or "")]
    return Difference(
        *(left.row_id, left.row_index, left.sample_index, what, at, *values),
        *(texts if has_texts else (None, None)),
    )


def spec_differences(
    left: JobRow, right: JobRow, shown: Callable[[JobRow], Iterable[tuple[str, str]]] = in_brief_of
) -> dict[str, tuple[Any, Any]]:
    """What decides outputs and differs between two jobs, by the names of the spec's fields.

    `shown`: the part of a job's templates that may be shown, by their names.
    """
    one, other = _deciding(left), _deciding(right)
    differing = [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]
    for job, values in ((left, one), (right, other)):
        may_be = {f"input.{name}": text for name, text in shown(job)}
        for name in _TEMPLATES:
            if values.get(name) is not None:
                values[name] = may_be.get(name, "not shown")
    return {name: (one.get(name), other.get(name)) for name in differing}


def _deciding(job: JobRow) -> dict[str, Any]:
    spec = job.spec
    values = {
        "model fingerprint": job.model_fingerprint,
        "numeric class": job.numeric_class,
        "verifier": job.verifier,
        "proposer": vllm_proposer_in(spec) or None,  # vLLM's bits depend on what it drafts
    }
    for part in _DECIDING:
        values |= dict(_flat(part, spec.get(part)))
    speculation = spec.get("speculation") or {}
    values |= {f"speculation.{name}": speculation.get(name) for name in _LIKEWISE}
    values |= dict(_flat("output.malformed", (spec.get("output") or {}).get("malformed") or {}))
    policies = spec.get("policies") or ()
    return values | ({"policies": _in_brief(policies)} if policies else {})


def _in_brief(policies: Sequence[Mapping[str, Any]]) -> str:
    """Their names, and a digest that tells them from others of these names."""
    digest = hashlib.sha256(orjson.dumps(policies, option=orjson.OPT_SORT_KEYS)).hexdigest()
    return f"{', '.join(str(policy.get('use')) for policy in policies)} ({digest[:8]})"


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for inner, of in value.items():
            yield from _flat(f"{name}.{inner}", of)
    else:
        yield name, value


def _key(row: ComparedRow) -> str:
    """What two rows have in common that belong together."""
    if row.row_id is None:
        return f"#{row.row_index}/{row.sample_index}"
    return f"={row.row_id}/{row.sample_index}"


def _belong_together(
    one: ComparedRow, other: ComparedRow, on_left: _Waiting, on_right: _Waiting
) -> bool:
    """Whether two rows that were read at once are partners, and none with their key came before."""
    key = _key(one)
    return key == _key(other) and not on_left.has(key) and not on_right.has(key)


def _note(found: Comparison, left: ComparedRow, right: ComparedRow, most: int) -> None:
    found.left.see(left)
    found.right.see(right)
    differs = difference(left, right)
    if differs is None:
        found.same += 1
        return
    found.differ += 1
    if len(found.differences) < most:
        found.differences.append(differs)


def _decided(row: ComparedRow) -> tuple[object, ...]:
    return (row.token_ids, row.text, row.finish_reason, row.error)


def _other_logprobs(left: ComparedRow, right: ComparedRow) -> bool:
    """Whether both were asked for them and got others."""
    return None not in (left.logprobs, right.logprobs) and left.logprobs != right.logprobs


def _first(left: ComparedRow, right: ComparedRow) -> tuple[int | None, str, tuple[Any, Any]]:
    """Where they differ first, in what, and both values there."""
    if None not in (left.token_ids, right.token_ids) and left.token_ids != right.token_ids:
        return _first_of("token", token_ids(left), token_ids(right))
    if left.text is not None and right.text is not None and left.text != right.text:
        return _first_of("character", left.text, right.text)
    for name in ("finish_reason", "error"):
        values = (getattr(left, name), getattr(right, name))
        if values[0] != values[1]:
            return None, name, values
    if _other_logprobs(left, right):
        return _first_of("log-probability", logprobs(left), logprobs(right))
    return None, "text", (left.text, right.text)  # only one of them has a text


def _first_of(what: str, left: Any, right: Any) -> tuple[int, str, tuple[Any, Any]]:
    at = first_place(left, right)
    one, other = (values[at] if at < len(values) else None for values in (left, right))
    return at, what, (one, other)


def first_place(left: Any, right: Any) -> int:
    """The first place where two sequences differ."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))


class _Waiting:
    """Rows of one job whose partners have not been read yet; equal keys in their order."""

    def __init__(self) -> None:
        # Without a name it is temporary: in memory until it is larger than the cache.
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._database.execute(f"CREATE TABLE waiting (key, {_COLUMNS})")
        self._database.execute("CREATE INDEX of_key ON waiting (key)")
        self._database.execute("BEGIN")
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, row: ComparedRow) -> None:
        self._database.execute(
            f"INSERT INTO waiting (key, {_COLUMNS}) VALUES (?, {_PLACES})",
            (_key(row), *_values(row)),
        )
        self._count += 1

    def has(self, key: str) -> bool:
        query = "SELECT 1 FROM waiting WHERE key = ?"
        return bool(self._count) and self._database.execute(query, (key,)).fetchone() is not None

    def take(self, key: str) -> ComparedRow | None:
        """Remove the first row with this key; None if there is none."""
        if not self._count:
            return None
        found = self._database.execute(
            f"SELECT rowid, {_COLUMNS} FROM waiting WHERE key = ? ORDER BY rowid LIMIT 1", (key,)
        ).fetchone()
        if found is None:
            return None
        self._database.execute("DELETE FROM waiting WHERE rowid = ?", found[:1])
        self._count -= 1
        return ComparedRow(*found[1:])

    def names(self, most: int) -> list[str]:
        """The first few, in words."""
        rows = self._database.execute(
            "SELECT row_id, row_index, sample_index FROM waiting ORDER BY row_index, sample_index "
            "LIMIT ?",
            (most,),
        )
        return [named(*row) for row in rows]

    def close(self) -> None:
        self._database.close()


def named(row_id: str | None, row_index: int, sample_index: int) -> str:
    """A row and sample in words."""
    row = f"row {row_index}" if row_id is None else row_id
    return f"{row} sample {sample_index}" if sample_index else row
