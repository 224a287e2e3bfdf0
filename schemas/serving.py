"""What `specbatch serve` keeps of its clients: files, batches and API keys.

Names and metadata that clients give are data. No path is ever made of them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from specbatch.schemas.errors import SpecbatchError, UsageError


class BatchPhase(StrEnum):
    """What the service itself still has to do for a batch."""

    NEW = "new"  # its file is to be checked
    RUNNING = "running"  # its job is to be submitted, and followed
    ENDED = "ended"  # its files are there, or the reason why not


class BatchStatus(StrEnum):
    """A batch's status, in OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class Purpose(StrEnum):
    """What a file is for."""

    BATCH = "batch"  # uploaded
    OUTPUT = "batch_output"  # made here


class Scope(StrEnum):
    """What an API key allows."""

    READ = "read"
    WRITE = "write"


class TooManyOpenError(SpecbatchError):
    """A tenant has as many open batches as it may have; the message says how many."""


class NoSuchFileError(UsageError):
    """A tenant has no file of this id."""


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list that is ordered by id, hence by time."""

    limit: int
    after: str | None = None  # the id before the first
    descending: bool = True


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file's row. Its bytes are in the folder of the service `service_id`, under its id."""

    file_id: str
    tenant: str
    purpose: Purpose
    filename: str
    size_bytes: int
    sha256: str
    service_id: str
    created_at: float = 0.0  # by the store's clock, when it is added


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch that a client asks for.

    `digest` is of what was asked for: the same idempotency key with another digest is refused.
    """

    batch_id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    window_sec: float
    digest: str
    service_id: str  # the service that does it, in whose folder its input is
    idempotency_key: str | None = None
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A batch as the store has it. Counts and files are those of an ended one."""

    batch_id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: float
    expires_at: float
    phase: BatchPhase
    service_id: str
    metadata: Mapping[str, str] | None = None
    model: str | None = None  # its name in the allow list
    job_id: str | None = None
    waits_because: str | None = None  # why its job is not done now, in words
    status: BatchStatus | None = None  # of an ended one
    errors: tuple[Mapping[str, Any], ...] = ()
    requests: int = 0  # lines of its input
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: float | None = None
    cancelling_at: float | None = None
    finalizing_at: float | None = None
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """How a batch ended, with the files that were made of its job's output."""

    status: BatchStatus
    completed: int = 0
    failed: int = 0
    output: StoredFile | None = None
    errors_file: StoredFile | None = None
    errors: tuple[Mapping[str, Any], ...] = ()
    finalizing_at: float | None = None


@dataclass(frozen=True, slots=True)
class TenantUse:
    """What a tenant has had since some time: its jobs, and its groups that were recorded."""

    jobs: int  # submitted since then
    completions: int
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float  # of the completions, without what was lost


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key's row. `digest` is the SHA-256 of its secret part, which is kept nowhere."""

    key_id: str
    name: str
    tenant: str
    scopes: frozenset[Scope]
    digest: bytes = field(repr=False)
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None

    def why_not(self, now: float) -> str | None:
        """Why it does not count at this time, in a word; None: it does."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else None


def new_id(prefix: str) -> str:
    """Sortable by time of creation, unguessable, safe in paths."""
    return f"{prefix}{time.time_ns() // 1_000_000:011x}{secrets.token_hex(10)}"
