"""Reads a job's audit log and collects what its entries say. Pure, without SQL or clock.

It believes only unchanged entries, and reports wrong ones by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from struct import error as struct_error
from typing import Any

import orjson

from specbatch.pipeline.audit.digests import entry_hash
from specbatch.schemas.audit import EMPTY, EntryKind, Finding, FindingKind, Head, LogEntry
from specbatch.schemas.records import JobState, Stage

# Columns of a job's row that are pinned after submission.
LATER_PINNED = ("numeric_class", "model_fingerprint", "model_parts", "proposer_fingerprint")

Key = tuple[int, int]  # row, sample
_STOPS = (EntryKind.CANCELLED, EntryKind.STOPPED)
_ENDS = (EntryKind.PUBLISHED, EntryKind.FAILED)
_SPOILT = (
    *(ValueError, TypeError, KeyError, IndexError),
    *(AttributeError, OverflowError, struct_error),
)


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """How a group ended."""

    stage: Stage
    number: int  # of the entry
    rows: int = 0  # of one that failed …
    error_sha256: str | None = None  # … and of why


@dataclass
class LogFacts:
    """The facts in a job's log. `expected` are columns of the job's row."""

    job_id: str
    entries: int = 0
    adopted: bool = False  # the job is older than its log, which pins only what came later
    expected: dict[str, Any] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)  # of the job's report
    published: bool = False  # and not retried since
    manifest: Mapping[str, str] | None = None  # of the current publication
    published_by: int | None = None  # the number of its entry
    accounts: Mapping[str, Any] | None = None  # pinned by it; None: it is too old for that
    output_purged: bool = False  # or may be, by the log of an earlier version
    hashes: dict[int, bytes] = field(default_factory=dict)  # number → hash, of all entries
    # (first row and sample, number) of entries with completions; numbers of those with rejected.
    completed: list[tuple[Key, int]] = field(default_factory=list)
    with_rejected: list[int] = field(default_factory=list)
    prompts: dict[int, tuple[str, int]] = field(default_factory=dict)  # group → sha256, rows
    ends: dict[int, GroupEnd] = field(default_factory=dict)  # by group, of those at their end
    purges: list[tuple[int, Any]] = field(default_factory=list)  # number, rows
    lacks: bool = False  # an entry is missing or cannot be believed

    def follow(self, log: Iterable[LogEntry], head: Head | None) -> Iterator[Finding]:
        """Read the log. `head` is its end by the job's row, None if the row is gone."""
        last, believed = EMPTY, True
        for entry in log:
            if entry.number != last.number + 1:
                yield self._missing(last.number + 1, entry.number - 1)
            fault = _fault(entry)
            follows = entry.number == last.number + 1
            if fault is None and believed and follows and entry.previous != last.hash:
                fault = f"does not follow entry {last.number}: one of them was replaced"
            if fault is None:
                fault = self._take(entry)
            if fault is not None:
                self.lacks = True
                yield _of_entry(entry.number, f"entry {entry.number} ({entry.kind}) {fault}")
            last, believed = entry.head, fault is None
            self.hashes[entry.number] = entry.hash
            self.entries += 1
        if head is not None:
            yield from self._check_end(last, head, believed)

    def _check_end(self, last: Head, head: Head, believed: bool) -> Iterator[Finding]:
        if head.number == last.number == 0:
            self.lacks = True
            yield _of_entry(
                None, "the job has no audit log: the job is older than that, or the log was removed"
            )
        elif head.number > last.number:
            yield self._missing(last.number + 1, head.number)
        elif head.number < last.number:
            self.lacks = True
            yield _of_entry(
                last.number,
                f"the log has {last.number} entries, but the job's row knows of {head.number}: the "
                "others were added by hand, or the row was changed",
            )
        elif head.hash != last.hash and believed:
            self.lacks = True
            yield _of_entry(
                last.number,
                f"entry {last.number}, the last, is not the one that the job's row names: one of "
                "both was changed",
            )

    def _missing(self, first: int, last: int) -> Finding:
        self.lacks = True
        which = f"entry {first} is" if first == last else f"entries {first} to {last} are"
        return _of_entry(first, f"{which} missing from the log")

    def _take(self, entry: LogEntry) -> str | None:
        """Note what a sound entry says. Returns what is wrong with it, if anything."""
        try:
            self._note(EntryKind(entry.kind), entry.number, orjson.loads(entry.payload))
        except _SPOILT:
            return "says nothing that specbatch would write"
        return None

    def _note(self, kind: EntryKind, number: int, said: dict[str, Any]) -> None:
        if kind in (EntryKind.SUBMITTED, EntryKind.ADOPTED):
            self._begin(kind, number, said)
        elif kind is EntryKind.PLANNED:
            for index, rows, sha256 in said["groups"]:
                self.prompts[index] = (sha256, rows)
            if said["rejected"]:
                self.with_rejected.append(number)
        elif kind is EntryKind.READ:
            self.expected["rows_total"] = said["rows_total"]
            self.models = said["models"]
        elif kind is EntryKind.PINNED:
            self.expected |= {name: said[name] for name in LATER_PINNED if name in said}
        elif kind in (EntryKind.GROUP, EntryKind.KEPT):
            if said["completions"]:
                row, sample, _ = said["completions"][0]
                self.completed.append(((row, sample), number))
            to = Stage.DONE if kind is EntryKind.GROUP else Stage.CANCELLED
            self.ends[said["index"]] = GroupEnd(to, number)
        elif kind is EntryKind.LOST:
            why = said["error_sha256"]
            self.ends[said["index"]] = GroupEnd(Stage.FAILED, number, said["rows"], why)
        elif kind in _STOPS:
            reason = self.expected.get("stop_reason") or said["reason"]
            self.expected |= {"cancel_requested": True, "stop_reason": reason}
        elif kind is EntryKind.RETRIED:
            self.expected |= {name: said[name] for name in ("deadline_at", "budget_usd")}
            self.expected |= {name: said[name] for name in LATER_PINNED if name in said}
            self.expected |= {"cancel_requested": False, "stop_reason": None}
            self._reopen_groups(said["quarantined"])
            self._reopen()
        elif kind is EntryKind.REVIEWED:
            self._reopen()
        elif kind in _ENDS:
            self.published = kind is EntryKind.PUBLISHED
            if not self.published and said["state"] != JobState.FAILED:
                raise ValueError(f"a job that failed is not {said['state']}")
            self.expected |= {name: said[name] for name in ("state", "error_sha256")}
            self.manifest, self.accounts = _manifest(said), _accounts(said)
            self.published_by = number
        elif kind is EntryKind.PURGED:
            self.purges.append((number, said.get("rows")))
            # Earlier versions did not say whether the output was deleted with the texts.
            self.output_purged |= bool(said.get("output", said.get("rows") is None))

    def _reopen_groups(self, quarantined: bool) -> None:
        """The groups that a retry takes up are no longer at their end."""
        for index, end in list(self.ends.items()):
            if quarantined:
                again = end.stage is Stage.FAILED and end.rows == 1
            else:
                again = end.stage is not Stage.DONE
            if again:
                del self.ends[index]

    def _reopen(self) -> None:
        """The job will be published again."""
        self.expected |= {"state": None, "error_sha256": None}
        self.published, self.manifest = False, None
        self.accounts = self.published_by = None

    def _begin(self, kind: EntryKind, number: int, said: dict[str, Any]) -> None:
        if number != 1:
            raise ValueError("a log has one beginning")
        self.expected |= said
        engine = said["spec"].get("engine") or {}
        if "numeric_class" in engine:  # else the job is older than numeric classes
            self.expected["numeric_class"] = engine["numeric_class"]
        if "model_fingerprint" in said["spec"]:  # likewise
            self.expected["model_fingerprint"] = said["spec"]["model_fingerprint"]
        self.adopted = kind is EntryKind.ADOPTED
        if not self.adopted:
            fresh = {"cancel_requested": False, "stop_reason": None}
            self.expected |= {**fresh, "state": None, "error_sha256": None}

    def was_purged(self, row: int, number: int) -> bool:
        """Whether a purge after entry `number` emptied this row."""
        return any(
            later > number and (rows is None or any(first <= row <= last for first, last in rows))
            for later, rows in self.purges
        )

    @property
    def texts_purged(self) -> bool:
        """Whether a purge emptied the texts of the job and of its groups."""
        return any(rows is None for _, rows in self.purges)

    def is_open(self) -> bool | None:
        """Whether the job is still open; None if the log does not say."""
        return None if "state" not in self.expected else self.expected["state"] is None


def _manifest(said: Mapping[str, Any]) -> Mapping[str, str] | None:
    """The manifest that the final entry names. Raises the errors of `_SPOILT`."""
    manifest = said["manifest"]
    return None if manifest is None else {name: str(manifest[name]) for name in ("uri", "sha256")}


def _accounts(said: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The accounts that the final entry pins. Raises `ValueError`."""
    accounts = said.get("accounts")
    if accounts is None or isinstance(accounts, Mapping):
        return accounts
    raise ValueError("accounts are an object")


def believed(entry: LogEntry | None, hashes: Mapping[int, bytes]) -> dict[str, Any]:
    """The payload of an entry that was read before. Raises if it changed since."""
    if entry is None or _fault(entry) or hashes.get(entry.number) != entry.hash:
        raise ValueError("the log changed while it was read: audit again")
    said: dict[str, Any] = orjson.loads(entry.payload)
    return said


def is_final(state: str) -> bool:
    return state in [one.value for one in JobState if one.is_final]


def _fault(entry: LogEntry) -> str | None:
    """Says what is wrong with an entry itself; None if nothing is."""
    try:
        computed = entry_hash(
            entry.job_id,
            entry.number,
            entry.kind,
            entry.at,
            entry.actor,
            entry.payload,
            entry.previous,
        )
    except _SPOILT:
        return "cannot be read"
    return None if computed == entry.hash else "was changed: it has not the hash that it had"


def _of_entry(number: int | None, what: str) -> Finding:
    return Finding(FindingKind.ENTRY, what, number=number)
