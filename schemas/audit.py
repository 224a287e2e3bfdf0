"""Entries of the audit log, and findings of an audit. Each job's log is a hash chain."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from specbatch.schemas.records import CompletionRecord, JobState, Prompts

FIRST = bytes(32)  # what the first entry of a chain follows


class EntryKind(StrEnum):
    """What an entry of the audit log is about. The comment beside each kind lists its payload."""

    SUBMITTED = "submitted"  # job: the pinned columns of its row
    ADOPTED = "adopted"  # the same, of a job that is older than its log
    PLANNED = "planned"  # groups: [index, rows, sha256 of prompts]; rejected: [row, code, digest]
    READ = "read"  # the input was read to its end: rows_total, models
    # What its groups are verified in or with from then on: numeric_class, or model_fingerprint with
    # its model_parts and the proposer_fingerprint.
    PINNED = "pinned"
    # A group is done: index, generation, completions: [row, sample, digest], policies: what each
    # policy of the job said.
    GROUP = "group"
    KEPT = "kept"  # the same, of what was finished of a group whose job was stopped
    LOST = "lost"  # a group whose attempts are used up: index, rows, error
    CANCELLED = "cancelled"  # by a user: reason
    STOPPED = "stopped"  # by its deadline or budget: reason
    RETRIED = "retried"  # quarantined, units, the limits that it has then, its class if that moved
    FAILED = "failed"  # the job ended without an output: error
    # The job ended: state, error, manifest (uri, sha256), accounts (`audit/accounts.py`).
    PUBLISHED = "published"
    PURGED = "purged"  # what was emptied: rows, null for all that were there; and why
    EXPORTED = "exported"  # what left the store: what, to
    # A person decided on completions that policies held back, and the output is published again:
    # decided: [row, sample, decision].
    REVIEWED = "reviewed"


@dataclass(frozen=True, slots=True)
class Head:
    """The end of a job's chain: the number and hash of its last entry."""

    number: int = 0
    hash: bytes = FIRST


EMPTY = Head()


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One stored entry. Nothing in it is trusted before `audit/replay_log.py` has checked it."""

    job_id: str
    number: int  # from 1, without a gap
    kind: str
    at: float
    actor: str
    payload: str  # canonical JSON, of which every byte counts
    previous: bytes
    hash: bytes

    @property
    def head(self) -> Head:
        return Head(self.number, self.hash)


MANIFEST_NAME = "manifest.json"  # in the folder or prefix of the output
DATA_FOLDER = "data"  # below it: completions and nothing else, so that any reader opens it


def data_uri(output_uri: str, state: JobState) -> str | None:
    """The folder or prefix with nothing but completions; None where none were published."""
    return f"{output_uri.rstrip('/')}/{DATA_FOLDER}" if state.has_output else None


@dataclass(frozen=True, slots=True)
class PublishedManifest:
    """The manifest of a published job."""

    uri: str
    sha256: str


@dataclass(frozen=True, slots=True)
class KeptCompletion:
    """A completion as the store has it, with what an audit needs to check it."""

    row_index: int
    sample_index: int
    group_index: int
    digest: bytes | None  # of its content; None: it was recorded before there was a log
    record: CompletionRecord | None  # None: its row cannot be read
    month: int | None = None  # by which it is stored; None: by none
    lacks_key: bool = False  # it cannot be read with the keys that are here


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """A group as the store has it: its prompts, and how it ended if it has."""

    index: int
    prompts: Prompts
    stage: str
    last_error: str | None = None
    lacks_key: bool = False  # its error cannot be read with the keys that are here


class FindingKind(StrEnum):
    """What kind of record differs from what it should be."""

    ENTRY = "entry"  # of the log: changed, missing, or not written by specbatch
    JOB = "job"  # the order, an action, or how a group ended is not what the log says
    PROMPTS = "prompts"  # a group has other prompts than those that were planned
    REJECTED = "rejected"  # a quarantined row is changed, missing or added
    COMPLETION = "completion"  # changed, missing or added
    OUTPUT = "output"  # the manifest, or a file that it names, differs from what was published
    ACCOUNTS = "accounts"  # figures, device time or decisions are not as they were published
    ANCHOR = "anchor"  # the log is not the one that was anchored outside the store
    INPUT = "input"  # what a completion says of its prompt is not so
    TOKEN = "token"  # not the verifier's choice, by more than arithmetic explains
    NEAR_TIE = "near tie"  # not its choice, but by so little that another batch explains it
    ENDING = "ending"  # it should have ended earlier, later, or with another text


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of an audit; `what` is a sentence that names it."""

    kind: FindingKind
    what: str
    number: int | None = None  # of the log's entry
    row: int | None = None
    sample: int | None = None
    position: int | None = None  # of the token in its completion, from 0
    written: int | None = None  # the recorded token
    decided: int | None = None  # the verifier's choice at this place
    margin: float | None = None  # in logits; None: no token was checked, or no number is enough


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One audit of a job, as the store has it."""

    job_id: str
    sampled: int  # completions that were checked again
    differing: int  # of these, with a difference
    tokens: int  # of these completions
    intact: bool  # the log and what it pins
    findings: tuple[Finding, ...] = ()
    note: str | None = None  # what could not be checked
    at: float = 0.0  # by the store, when it was kept …
    actor: str = ""  # … and on whose behalf


@dataclass(frozen=True, slots=True)
class Correctness:
    """How many completions audits checked, and how many of them had no difference."""

    audited: int = 0
    differing: int = 0

    @property
    def share(self) -> float | None:
        return 1.0 - self.differing / self.audited if self.audited else None
