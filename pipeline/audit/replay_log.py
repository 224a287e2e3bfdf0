"""Compares a job with its log: order, actions, groups, rejected rows, completions.

Log and completions are streamed, and findings name what differs. Only the chain is trusted. Someone
who rewrote all of it, the job's row included, is found by the manifest, which is stored elsewhere.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from struct import error as struct_error
from typing import Any

from specbatch.pipeline.audit.digests import chained, content_digest, facts_digest, rejected_digest
from specbatch.pipeline.audit.entries import PINNED, sha256_of
from specbatch.pipeline.audit.log_facts import (
    LATER_PINNED,
    GroupEnd,
    Key,
    LogFacts,
    believed,
    is_final,
)
from specbatch.schemas.audit import Finding, FindingKind, KeptCompletion, KeptGroup, LogEntry
from specbatch.schemas.earlier_specs import differences
from specbatch.schemas.encryption import SETTING
from specbatch.schemas.months import month_of
from specbatch.schemas.records import FIRST_SPLIT_INDEX, CompletionRecord, RejectedRow, Stage

EntryAt = Callable[[int], LogEntry | None]
Placed = tuple[Key, int, str, int]  # (row, sample), entry, digest, group

_SPOILT = (ValueError, TypeError, OverflowError, AttributeError, struct_error)
_KEYLESS = f"was written with a key that is not among those of {SETTING}, or changed: add the key"


@dataclass(frozen=True, slots=True)
class LoggedCompletion:
    """What the log says of a completion."""

    key: Key
    digest: str
    number: int  # of the entry
    group: int


@dataclass
class Counts:
    """How much was compared."""

    completions: int = 0  # in the log
    purged: int = 0  # of these, whose content was purged by the log
    uncovered: int = 0  # older than the log


@dataclass
class Checker:
    """Compares the store with what a job's log says."""

    log: LogFacts
    entry_at: EntryAt
    counts: Counts = field(default_factory=Counts)

    # --- order and actions ------------------------------------------------------------------
    def job(self, facts: Mapping[str, Any] | None) -> Iterator[Finding]:
        """The columns of the job's row."""
        expected = self.log.expected
        if facts is None:
            yield _job("the job's row is gone; its log outlives it")
            return
        for name in (*PINNED, "rows_total", "cancel_requested", "stop_reason", *LATER_PINNED):
            if name not in expected:
                continue
            if name not in facts:
                yield _job(f"the order was changed: {name} cannot be read")
            elif facts[name] != expected[name]:
                yield _job(_what_changed(name, expected[name], facts[name]))
        yield from self._report(facts.get("report"))
        yield from self._end(facts)

    def _report(self, report: Any) -> Iterator[Finding]:
        if not isinstance(report, Mapping):
            yield _job("the job's report cannot be read")
            return
        for name, value in self.log.models.items():
            if report.get(name) != value:
                yield _job(f"the report was changed: {name} was {value!r} when the input was read")

    def _end(self, facts: Mapping[str, Any]) -> Iterator[Finding]:
        state, is_open = str(facts.get("state")), self.log.is_open()
        if is_open is None:
            return
        if is_open:
            if is_final(state):
                yield _job(f"the job's state is {state}, but nobody ended it by its log")
        elif state != self.log.expected["state"]:
            yield _job(f"the job's state is {state}, but it ended as {self.log.expected['state']}")
        elif sha256_of(facts.get("error")) != self.log.expected["error_sha256"]:
            yield _job("the error with which the job ended was changed")

    # --- prompts ----------------------------------------------------------------------------
    def groups(self, groups: Iterable[KeptGroup]) -> Iterator[Finding]:
        """The prompts of groups: those that were planned, each once; and how each group ended."""
        planned, found = self.log.prompts, set[int]()
        rows: Counter[str] = Counter()
        known = {sha256 for sha256, _ in planned.values()}
        for one in groups:
            yield from self._ended(one)
            index, prompts = one.index, one.prompts
            sha256 = prompts.artefact.sha256
            rows[sha256] += prompts.rows
            found.add(index)
            if index >= FIRST_SPLIT_INDEX:
                wrong = sha256 not in known
            else:
                wrong = index in planned and planned[index][0] != sha256
                if index not in planned and not self._may_lack:
                    yield _prompts(f"group {index} is not in the log: it was added by hand")
                    continue
            if wrong and not self._may_lack:
                yield _prompts(f"group {index} has other prompts than were planned")
        for index in sorted(set(planned) - found):
            yield _prompts(f"group {index} is missing from the store")
        wanted: Counter[str] = Counter()
        for sha256, count in planned.values():
            wanted[sha256] += count
        for sha256, count in wanted.items():
            if rows[sha256] != count and set(planned) <= found:
                index = next(i for i, one in planned.items() if one[0] == sha256)
                yield _prompts(
                    f"the prompts of group {index} are {count} rows, but its parts in the store "
                    f"have {rows[sha256]}"
                )

    def _ended(self, group: KeptGroup) -> Iterator[Finding]:
        """Of a job that has ended: how this group did."""
        if self.log.lacks or self.log.is_open() is not False:
            return
        name, end = f"group {group.index}", self.log.ends.get(group.index)
        if end is None:
            if group.stage != Stage.CANCELLED and not self.log.adopted:
                yield _job(f"{name} is {group.stage}, but no entry of the log says so")
        elif group.stage != end.stage:
            said = f"but by entry {end.number} of the log it is {end.stage}"
            yield _job(f"{name} is {group.stage}, {said}", end.number)
        elif end.stage is not Stage.CANCELLED and not self._fits_error(group, end):
            yield _job(f"the error of {name} {_KEYLESS if group.lacks_key else 'was changed'}")

    def _fits_error(self, group: KeptGroup, end: GroupEnd) -> bool:
        if group.last_error is None and self.log.texts_purged:
            return True
        return sha256_of(group.last_error) == end.error_sha256

    # --- rejected rows ----------------------------------------------------------------------
    def rejected(self, rows: Iterable[RejectedRow]) -> Iterator[Finding]:
        """Quarantined rows, each as it was when it was rejected."""
        there = ((row.row_index, row) for row in rows)
        for row_index, pinned, row in _both(self._pinned_rejected(), there):
            if row is None:
                yield _rejected(row_index, "is missing")
            elif pinned is None:
                if not self._may_lack:
                    yield _rejected(row_index, "is not in the log: it was added by hand")
            elif not self._is_as_pinned(row, *pinned):
                yield _rejected(row_index, "was changed")

    def _is_as_pinned(self, row: RejectedRow, code: str, digest: str, number: int) -> bool:
        if row.row_id is None and not row.reason and self.log.was_purged(row.row_index, number):
            return row.code == code
        return _digest_of_rejected(row) == digest

    def _pinned_rejected(self) -> Iterator[tuple[int, tuple[str, str, int]]]:
        """Row, and its code, digest and entry."""
        for number in self.log.with_rejected:
            said = believed(self.entry_at(number), self.log.hashes)
            for row_index, code, digest in said["rejected"]:
                yield row_index, (code, digest, number)

    # --- completions ------------------------------------------------------------------------
    def completions(
        self,
        kept: Iterable[KeptCompletion],
        seen: Callable[[KeptCompletion], None] = lambda _: None,
    ) -> Iterator[Finding]:
        """All completions by (row, sample). `seen` is called with each that exists."""
        extra: Counter[int] = Counter()
        first: dict[int, Key] = {}
        there = (((one.row_index, one.sample_index), one) for one in kept)
        for key, pinned, one in _both(((p.key, p) for p in self._pinned()), there):
            if one is not None:
                seen(one)
            if pinned is None:
                assert one is not None
                if one.digest is None and self.log.adopted:
                    self.counts.uncovered += 1
                else:
                    extra[one.group_index] += 1
                    first.setdefault(one.group_index, key)
                continue
            self.counts.completions += 1
            wrong = "is missing" if one is None else self._wrong(one, pinned)
            if wrong is not None:
                yield _completion(key, wrong, pinned.number)
        for group, count in sorted(extra.items()):
            others = f" and {count - 1} more of group {group}" if count > 1 else ""
            which = "are in no entry" if count > 1 else "is in no entry"
            why = "of the log, which lacks some" if self.log.lacks else "of the log: added by hand"
            yield _completion(first[group], f"{others.strip()} {which} {why}".strip(), None)

    def _wrong(self, one: KeptCompletion, pinned: LoggedCompletion) -> str | None:
        """What is wrong with a completion that the log knows."""
        if one.record is None:
            return _KEYLESS if one.lacks_key else "was changed: it cannot be read"
        content, facts = _of(content_digest, one.record), _of(facts_digest, one.record)
        if not _fits(pinned, one.digest, facts):
            if _fits(pinned, content, facts):
                return "has another digest than it had; the completion itself is as it was"
            return f"was changed: entry {pinned.number} of the log tells of another one"
        if content != one.digest:
            if not (_is_empty(one.record) and self.log.was_purged(one.row_index, pinned.number)):
                return "was changed: its tokens, text or log-probabilities are not those recorded"
            self.counts.purged += 1
        made_at = self.log.expected.get("created_at")  # None: the entry that says it is spoilt
        if made_at is not None and one.month not in (None, month_of(float(made_at))):
            return f"was moved to month {one.month}, which is not its job's"
        if one.group_index != pinned.group:
            return f"was moved to group {one.group_index} from group {pinned.group}"
        return None

    def _pinned(self) -> Iterator[LoggedCompletion]:
        """What the log pins of completions, by (row, sample). The first entry of each counts."""
        for key, same in groupby(self._all_pinned(), key=itemgetter(0)):
            _, number, digest, group = next(same)
            yield LoggedCompletion(key, digest, number, group)

    def _all_pinned(self) -> Iterator[Placed]:
        """Entries are opened where their first completion is due, so few are held at a time."""
        open_ones: list[tuple[Placed, int, Iterator[Placed]]] = []

        def advance(rest: Iterator[Placed], place: int) -> None:
            if (after := next(rest, None)) is not None:
                heapq.heappush(open_ones, (after, place, rest))

        for place, (first, number) in enumerate(sorted(self.log.completed)):
            while open_ones and open_ones[0][0][0] < first:
                yield open_ones[0][0]
                _, at, rest = heapq.heappop(open_ones)
                advance(rest, at)
            advance(self._of_entry(number), place)
        while open_ones:
            yield open_ones[0][0]
            _, at, rest = heapq.heappop(open_ones)
            advance(rest, at)

    def _of_entry(self, number: int) -> Iterator[Placed]:
        said = believed(self.entry_at(number), self.log.hashes)
        for row, sample, digest in sorted(said["completions"]):
            yield (row, sample), number, digest, said["index"]

    @property
    def _may_lack(self) -> bool:
        """Whether data may exist that the log does not cover, or no longer covers."""
        return self.log.adopted or self.log.lacks


def _both(
    pinned: Iterator[tuple[Any, Any]], there: Iterator[tuple[Any, Any]]
) -> Iterator[tuple[Any, Any, Any]]:
    """(key, what is pinned, what exists), by key; None for a missing side. Inputs are sorted."""
    left, right = next(pinned, None), next(there, None)
    while left is not None or right is not None:
        if right is None or (left is not None and left[0] < right[0]):
            assert left is not None
            yield left[0], left[1], None
            left = next(pinned, None)
        elif left is None or right[0] < left[0]:
            yield right[0], None, right[1]
            right = next(there, None)
        else:
            yield left[0], left[1], right[1]
            left, right = next(pinned, None), next(there, None)


def _what_changed(name: str, was: Any, now: Any) -> str:
    if name in ("cancel_requested", "stop_reason"):
        return f"an action was changed: {name} is {now!r}, by the log it is {was!r}"
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        fields = ", ".join(sorted(differences(was, now)))
        return f"the order was changed: {name} ({fields or 'its form'})"
    return f"the order was changed: {name} is {now!r}, by the log it is {was!r}"


def _of(digest: Callable[[CompletionRecord], bytes], record: CompletionRecord) -> bytes | None:
    """The digest; None for values that no store ever wrote."""
    try:
        return digest(record)
    except _SPOILT:
        return None


def _fits(pinned: LoggedCompletion, content: bytes | None, facts: bytes | None) -> bool:
    """Whether these digests are those in the log."""
    return content is not None and facts is not None and chained(content + facts) == pinned.digest


def _digest_of_rejected(row: RejectedRow) -> str | None:
    try:
        return rejected_digest(row)
    except _SPOILT:
        return None


def _is_empty(record: CompletionRecord) -> bool:
    """Whether nothing is left of what a purge empties."""
    texts = (record.row_id, record.text, record.error)
    tokens = (record.token_ids, record.logprobs, record.provenance.rejected)
    return not any(texts) and not any(tokens) and record.top_logprobs is None


def _job(what: str, number: int | None = None) -> Finding:
    return Finding(FindingKind.JOB, what, number=number)


def _prompts(what: str) -> Finding:
    return Finding(FindingKind.PROMPTS, what)


def _rejected(row: int, what: str) -> Finding:
    return Finding(FindingKind.REJECTED, f"quarantined row {row} {what}", row=row)


def _completion(key: Key, what: str, number: int | None) -> Finding:
    row, sample = key
    message = f"the completion of row {row}, sample {sample} {what}"
    return Finding(FindingKind.COMPLETION, message, number=number, row=row, sample=sample)
