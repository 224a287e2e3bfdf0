"""What a store must do for audits. Part of the contract in `contract.py`.

The log is written by the store's other methods, in the transaction of what they do. Each names an
actor: the owner of the lease that it comes with, else whom the store works for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from specbatch.pipeline.audit.accounts import AccountRows
from specbatch.schemas.audit import (
    AuditRecord,
    Correctness,
    EntryKind,
    Head,
    KeptCompletion,
    LogEntry,
)
from specbatch.schemas.records import Prompts


class AuditStore(Protocol):
    """The audit log of every job, what it pins, and audits."""

    def note_action(self, job_id: str, kind: EntryKind, payload: Mapping[str, Any]) -> Head:
        """Add an entry about what this store's user did with a job, and nothing else.

        Raises `JobNotFoundError`.
        """
        ...

    def log(self, job_id: str, after: int = 0, batch: int = 64) -> Iterator[LogEntry]:
        """The entries of a job's log behind number `after`, in their order, streamed."""
        ...

    def log_head(self, job_id: str) -> Head:
        """The end of the log as the job's row has it; that of no log when there is no such job."""
        ...

    def logged_job(self, job_id: str) -> str:
        """The whole id of a job that has a row or a log, by id or a unique prefix.

        Raises `JobNotFoundError`. What its row says is not looked at.
        """
        ...

    def job_facts(self, job_id: str) -> Mapping[str, Any] | None:
        """The columns of a job's row by name, read without trust; None when there is no row.

        One that cannot be read is left out.
        """
        ...

    def kept(self, job_id: str, batch: int = 500) -> Iterator[KeptCompletion]:
        """All completions with their digests by (row, sample), read without trust."""
        ...

    def kept_one(self, job_id: str, row: int, sample: int) -> KeptCompletion | None:
        """One of them; None when there is none."""
        ...

    def groups(self, job_id: str) -> Iterator[tuple[int, Prompts]]:
        """All groups by index, with where their prompts lie."""
        ...

    def accounts(self, job_id: str) -> AccountRows:
        """A job's figures, device time and decisions, read without trust.

        Raises `ValueError`, `TypeError`, `KeyError` or `StoreError` where they cannot be read.
        """
        ...

    def keep_audit(self, audit: AuditRecord) -> None:
        """Keep what an audit found."""
        ...

    def audits(self, job_id: str) -> list[AuditRecord]:
        """All audits of a job with their findings, the oldest first."""
        ...

    def correctness(self, since: float = 0.0) -> Correctness:
        """Of all jobs: completions that audits since then looked at, and how many differed."""
        ...
