"""What the audit log says and what an audit finds. The log of a job is a chain: see `chain.py`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

FIRST = bytes(32)  # what the first entry of a chain follows


class EntryKind(StrEnum):
    """What an entry of the audit log is about. Its payload's keys stand behind each."""

    SUBMITTED = "submitted"  # job: the pinned columns of its row
    ADOPTED = "adopted"  # the same, of a job that is older than its log
    PLANNED = "planned"  # groups: [index, rows, sha256 of prompts]; rejected: [row, digest]
    READ = "read"  # the input was read to its end: rows_total, models
    GROUP = "group"  # a group is done: index, generation, completions: [row, sample, digest]
    KEPT = "kept"  # the same, of what was finished of a group whose job was stopped
    LOST = "lost"  # a group whose attempts are used up: index, rows, error
    CANCELLED = "cancelled"  # by somebody: reason
    STOPPED = "stopped"  # by its deadline or budget: reason
    RETRIED = "retried"  # quarantined, units, and the limits that it has then
    FAILED = "failed"  # the job ended without an output: error
    PUBLISHED = "published"  # the job ended: state, error, manifest (uri, sha256)
    PURGED = "purged"  # what was emptied: rows, null for all that were there; and why
    EXPORTED = "exported"  # what left the store: what, to


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry as it is kept. Nothing in it is trusted before `checking.py` has seen it."""

    job_id: str
    number: int  # from 1, without a gap
    kind: str
    at: float
    actor: str
    payload: str  # canonical JSON, of which every byte counts
    previous: bytes
    hash: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """The end of a job's chain: the number and hash of its last entry."""

    number: int = 0
    hash: bytes = FIRST


EMPTY = Head()


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a published job."""

    uri: str
    sha256: str
