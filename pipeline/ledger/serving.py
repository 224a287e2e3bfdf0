"""What a store keeps for `specbatch serve`: files, batches, API keys; and a tenant's jobs.

A tenant's reads never find what is another tenant's: it looks as if it were not there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from specbatch.pipeline.ledger.fair_share import Turn
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.records import JobRow, JobState
from specbatch.schemas.serving import (
    ApiKey,
    BatchEnd,
    BatchRow,
    NewBatch,
    Page,
    Purpose,
    StoredFile,
    TenantUse,
)


class Serving(Protocol):
    """Files, batches, API keys and jobs by tenant. Lists are pages by id."""

    # --- files ------------------------------------------------------------------------------
    def add_file(self, file: StoredFile) -> StoredFile:
        """Its bytes must be in place: from now on it is listed."""

    def file(self, tenant: str, file_id: str) -> StoredFile | None: ...

    def files(
        self, tenant: str, page: Page, purpose: Purpose | None = None
    ) -> list[StoredFile]: ...

    def file_ids(self, service_id: str) -> set[str]:
        """Of all tenants, those of one service."""

    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Whether it was there. Raises `InUseError` while an open batch reads it."""

    # --- batches ----------------------------------------------------------------------------
    def add_batch(self, batch: NewBatch, most_open: int) -> tuple[BatchRow, bool]:
        """Insert a batch. A known idempotency key of the tenant returns its batch and False.

        Raises `IdempotencyError` for another digest, `NoSuchFileError` where its input is not in
        the folder of its service, and `TooManyOpenError` where the tenant has `most_open` open
        batches.
        """

    def batch(self, tenant: str, batch_id: str) -> BatchRow | None: ...

    def batches(self, tenant: str, page: Page) -> list[BatchRow]: ...

    def batch_of_file(self, tenant: str, file_id: str) -> BatchRow | None:
        """The batch that made the file."""

    def open_batches(self, service_id: str) -> list[BatchRow]:
        """Those of all tenants that one service has not ended, oldest first."""

    def in_turn(self, job_ids: Sequence[str], running: str | None = None) -> list[Turn]:
        """These jobs in fair-share order: the first is to be done first. Of job `running` also
        what its groups under way are charged with."""

    def begin_batch(self, batch_id: str, model: str, requests: int) -> BatchRow:
        """Its file is good: a job is to be submitted. One that was cancelled meanwhile stays so."""

    def note_batch_job(self, batch_id: str, job_id: str) -> BatchRow:
        """The job that does it."""

    def note_batch_waits(self, batch_id: str, why: str | None) -> BatchRow:
        """Why its job is not done now, in words; None: it is."""

    def cancel_batch(self, tenant: str, batch_id: str) -> BatchRow | None:
        """Note the request; the caller cancels the job. A batch that has not begun is cancelled at
        once, an ended one stays as it is.
        """

    def end_batch(self, batch_id: str, end: BatchEnd) -> BatchRow:
        """End it and add its files, all or nothing. The first end stays."""

    # --- keys -------------------------------------------------------------------------------
    def add_api_key(self, key: ApiKey) -> ApiKey: ...

    def api_key(self, key_id: str) -> tuple[ApiKey, float] | None:
        """The key, and the store's time, by which it expires."""

    def api_keys(self) -> tuple[list[ApiKey], float]:
        """All, oldest first, and the store's time, by which they expire."""

    def revoke_api_key(self, key_id: str) -> ApiKey | None:
        """None: there is none. The first time of a revocation stays."""

    # --- jobs of batches --------------------------------------------------------------------
    def give_up_job(self, job_id: str, state: JobState, error: str | None = None) -> bool:
        """End a job that can be neither done nor published, whatever its groups are at.

        Open groups become CANCELLED, and their holders lose them. False: it had ended already.
        """

    # --- several jobs at once ---------------------------------------------------------------
    def jobs_of_ids(self, job_ids: Collection[str]) -> Mapping[str, JobRow]:
        """By whole id, those there are."""

    def holders_of(self, job_ids: Collection[str]) -> Mapping[str, Sequence[str]]:
        """As `holders`, of those that are held."""

    def progress_of(self, job_ids: Collection[str]) -> Mapping[str, JobProgress]:
        """Counts of those there are, by whole id."""

    # --- a tenant's jobs --------------------------------------------------------------------
    def tenant_job(self, tenant: str, job_id: str) -> JobRow | None:
        """By its whole id."""

    def tenant_jobs(
        self, tenant: str, page: Page, state: JobState | None = None, name: str | None = None
    ) -> list[JobRow]:
        """In a state, and of a name, if these are given."""

    def tenant_states(self, tenant: str) -> Mapping[JobState, int]:
        """How many jobs it has in each state, without states that none is in."""

    def tenant_use(self, tenant: str, since: float = 0.0) -> TenantUse:
        """What it has had since then, in seconds since the epoch."""
