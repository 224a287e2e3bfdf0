"""What a store must do. `SqlStore` and `MemoryStore` both do it; one test body proves them alike.

Every write that follows a claim names the lease's generation and raises `FencedError` when it is no
longer current. Times are seconds since the epoch by the store's own clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from specbatch.schemas.records import (
    Artefact,
    Bell,
    CompletionRecord,
    GroupWork,
    JobProgress,
    JobRow,
    JobState,
    JobWork,
    Lease,
    NewGroup,
    NewJob,
    RejectedRow,
    SourcePosition,
    Stage,
    StageTiming,
)


class Store(Protocol):
    """Jobs, groups, leases, completions."""

    # --- jobs -------------------------------------------------------------------------------
    def create_job(self, job: NewJob) -> tuple[JobRow, bool]:
        """Insert a job; with a known idempotency key return that job and False.

        Raises `IdempotencyError` (naming the differing top-level fields, dotted) when the key is
        known with another spec digest. A known `job_id` is treated the same way.
        """
        ...

    def get_job(self, job_id: str) -> JobRow:
        """Raises `JobNotFoundError`. A unique prefix of at least 6 characters is enough."""
        ...

    def list_jobs(self, limit: int = 50, state: JobState | None = None) -> list[JobRow]:
        """Newest first."""
        ...

    def progress(self, job_id: str) -> JobProgress: ...

    def request_cancel(self, job_id: str) -> JobRow:
        """Set the cancel flag; groups that are not leased become CANCELLED at once.

        A final job is returned unchanged. When nothing is left to do the job moves on to PUBLISH.
        """
        ...

    def retry_job(self, job_id: str) -> int:
        """Send FAILED and CANCELLED groups (and a failed ingest) back to work; returns how many.

        Only a final job can be retried; raises `UsageError` otherwise. Clears the cancel flag and
        the error, sets the state to RUNNING. A group starts again at RECORD when it has results, at
        VERIFY when it has drafts, else at its first stage; ingest goes on from its cursor. A FAILED
        or CANCELLED job with all groups done goes back to PUBLISH (that counts as one). With
        nothing to send back the job stays as it is and 0 is returned.
        """
        ...

    def fail_job(self, lease: Lease, error: str) -> None:
        """End the job as FAILED (an input or model that cannot be used). Needs a job lease.

        Its open groups become CANCELLED; whoever holds one learns it from the next heartbeat.
        """
        ...

    # --- leases -----------------------------------------------------------------------------
    def claim_job(self, job_id: str, stage: Stage, owner: str, lease_sec: float) -> JobWork | None:
        """Claim the job's INGEST or PUBLISH; None when it is not at that stage or leased.

        The first claim of INGEST starts the job (RUNNING, `started_at`). INGEST of a job with the
        cancel flag is left instead: for PUBLISH, or RUN while groups are open. A job whose attempts
        are used up becomes FAILED instead; attempts count from the last `add_groups`.
        """
        ...

    def claim_group(
        self, job_id: str, index: int, stage: Stage, owner: str, lease_sec: float
    ) -> GroupWork | None:
        """Claim a group at `stage`; None when somebody else has it or it is elsewhere.

        Raises the generation and the attempt count in the same statement. A group whose attempts
        are used up (`max_attempts` of the store) becomes FAILED instead, and None is returned; at
        PROPOSE it goes on to VERIFY without drafts instead, for a draft is only a hint. A group of
        a job with the cancel flag becomes CANCELLED instead (not at RECORD: finished work is kept).
        """
        ...

    def heartbeat(self, leases: Sequence[Lease], lease_sec: float) -> tuple[set[Lease], set[str]]:
        """Extend leases; returns (leases no longer held, ids of jobs with the cancel flag)."""
        ...

    def release(self, lease: Lease, error: str, forgiven: bool = False) -> None:
        """Give a unit back after an error: ready again, or FAILED when attempts are used up.

        `forgiven` takes the attempt off the count: the worker was stopped, not the work at fault.

        At PROPOSE, used up attempts lead to VERIFY without drafts. A lost lease is ignored. A job
        lease (INGEST, PUBLISH) that runs out of attempts fails the job. With the cancel flag, a
        group becomes CANCELLED (not at RECORD) and INGEST is left.
        """
        ...

    def cancel_group(self, lease: Lease) -> None:
        """The worker stopped this group because its job was cancelled: CANCELLED.

        When it was the last open group the job moves to PUBLISH (unless its input is being read).
        """
        ...

    def due(self, limit: int = 1000) -> list[Bell]:
        """Units that are ready, or whose lease ran out: what the sweeper rings for."""
        ...

    # --- ingest -----------------------------------------------------------------------------
    def add_groups(
        self,
        lease: Lease,
        groups: Sequence[NewGroup],
        rejected: Sequence[RejectedRow],
        next_row: int,
        cursor: SourcePosition,
    ) -> None:
        """One transaction: groups, quarantined rows, and where to read on.

        Group indexes go on from the last one, else `StoreError`. Groups of a job with the cancel
        flag are born CANCELLED.
        """
        ...

    def finish_ingest(self, lease: Lease, rows_total: int, models: Mapping[str, Any]) -> None:
        """The input is read. `models` (fingerprints) is kept in the job's report.

        Moves to RUN, or straight to PUBLISH when no group is left to do.
        """
        ...

    # --- groups -----------------------------------------------------------------------------
    def advance(
        self, lease: Lease, to: Stage, artefact: Artefact | None, timing: StageTiming
    ) -> None:
        """PROPOSE → VERIFY with a drafts file (or None), VERIFY → RECORD with a results file.

        Ends the lease, resets attempts, adds the timing (queue seconds: ready to claimed).
        """
        ...

    def commit_group(
        self,
        lease: Lease,
        completions: Sequence[CompletionRecord],
        timing: StageTiming,
        report: Mapping[str, float],
    ) -> None:
        """One transaction: completions (unique on job, row, sample), group DONE, totals, report.

        `report` values are added, key by key, to the job's report. When it was the last group and
        ingest is done, the job moves to PUBLISH. Log probabilities are kept in single precision.
        """
        ...

    # --- publish ----------------------------------------------------------------------------
    def completions(self, job_id: str, batch: int = 1000) -> Iterator[CompletionRecord]:
        """All completions by (row, sample), streamed."""
        ...

    def rejected(self, job_id: str) -> Iterator[RejectedRow]:
        """Quarantined rows, by row. Failed groups are told by `failed_groups`."""
        ...

    def failed_groups(self, job_id: str) -> list[tuple[int, str, Artefact, str]]:
        """(index, failed or cancelled, prompts artefact, last error) of unfinished groups."""
        ...

    def finish_job(self, lease: Lease, state: JobState, error: str | None = None) -> None:
        """End a published job. DONE, PARTIAL, FAILED or CANCELLED."""
        ...

    def close(self) -> None: ...
