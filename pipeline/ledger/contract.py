"""What a store must do. `SqlStore` does it; one test body runs on SQLite and PostgreSQL.

Every write that follows a claim names the lease's generation and raises `FencedError` when it is no
longer current. Times are seconds since the epoch by the store's own clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from specbatch.pipeline.ledger.audit_contract import AuditStore
from specbatch.pipeline.ledger.figures_contract import FiguresStore
from specbatch.pipeline.ledger.lease_contract import LeaseStore
from specbatch.pipeline.ledger.presence_contract import PresenceStore
from specbatch.pipeline.ledger.privacy_contract import PrivacyStore
from specbatch.pipeline.ledger.reporting_contract import ReportingStore
from specbatch.pipeline.ledger.schedule_contract import ScheduleStore
from specbatch.pipeline.ledger.time_contract import TimeLedger
from specbatch.schemas.audit import PublishedManifest
from specbatch.schemas.fingerprint import Models
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.records import (
    Artefact,
    CompletionRecord,
    JobRow,
    JobState,
    Lease,
    NewGroup,
    NewJob,
    Prompts,
    RejectedRow,
    SourcePosition,
    Stage,
    StageTiming,
)
from specbatch.schemas.speculation import AcceptanceCount, Decision, PastOutput
from specbatch.schemas.timekeeping import Spent


class Store(
    AuditStore,
    FiguresStore,
    LeaseStore,
    PresenceStore,
    PrivacyStore,
    ReportingStore,
    ScheduleStore,
    TimeLedger,
    Protocol,
):
    """Jobs, groups, leases, completions, what drafting taught, schedules, the audit log, time."""

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

    def job_of_key(self, key: str) -> JobRow | None:
        """The job that was created with this idempotency key, if one was."""
        ...

    def list_jobs(self, limit: int = 50, state: JobState | None = None) -> list[JobRow]:
        """Newest first."""
        ...

    def progress(self, job_id: str) -> JobProgress: ...

    def request_cancel(self, job_id: str, reason: str | None = None) -> JobRow:
        """Set the cancel flag; groups that are not leased become CANCELLED at once.

        A final job is returned unchanged. When nothing is left to do the job moves on to PUBLISH.
        The job keeps the first reason that it was given, in words.
        """
        ...

    def stop_overdue(self) -> set[str]:
        """Cancel live jobs whose deadline has passed or whose budget is spent; their ids.

        Spent is what attempts that got on have cost, and what those in flight have so far.
        """
        ...

    def look(self, spent_usd: Mapping[Lease, float]) -> set[str]:
        """Which of the leases' jobs have the cancel flag, after `stop_overdue` on them.

        Each lease comes with what its attempt has cost so far. Extends nothing: to be asked often,
        it writes only where a job has a limit.
        """
        ...

    def retry_job(
        self,
        job_id: str,
        quarantined: bool = False,
        numeric_class: str | None = None,
        models: Models | None = None,
    ) -> int:
        """Send FAILED and CANCELLED groups (and a failed ingest) back to work; returns how many.

        Only a final job can be retried; raises `UsageError` otherwise. Clears the cancel flag and
        the error, sets the state to RUNNING. A group starts again at RECORD when it has results, at
        VERIFY when it has drafts, else at its first stage; ingest goes on from its cursor. A FAILED
        or CANCELLED job with all groups done goes back to PUBLISH (that counts as one). With
        nothing to send back the job stays as it is and 0 is returned. A deadline that has passed
        and a budget that stopped the job are lifted.

        `quarantined`: only FAILED groups of a single row are sent back, and nothing else. Raises
        `UsageError` then when the input was not read to its end.

        `numeric_class`, `models`: what is not finished is verified in that class, or with that
        model, from now on. With them a job that goes on can be retried too: groups that are held at
        VERIFY are taken away from their holders and start again; returns how many groups are still
        to be verified. Raises `UsageError` for a class that contradicts the job's spec, and for a
        model to which the prompts would be other tokens.
        """
        ...

    def fail_job(self, lease: Lease, error: str) -> None:
        """End the job as FAILED (an input or model that cannot be used). Needs a job lease.

        Its open groups become CANCELLED; whoever holds one learns it from the next heartbeat.
        """
        ...

    # --- ingest -----------------------------------------------------------------------------
    def add_groups(
        self,
        lease: Lease,
        groups: Sequence[NewGroup],
        rejected: Sequence[RejectedRow],
        next_row: int,
        cursor: SourcePosition,
        from_row: int | None = None,
    ) -> None:
        """One transaction: groups, quarantined rows, and where to read on.

        Group indexes go on from the last one, else `StoreError`. Groups of a job with the cancel
        flag are born CANCELLED. `from_row` is where the reader believes that its earlier groups
        end. Raises `FencedError` where they do not: the store was restored from a copy that lacks
        some.
        """
        ...

    def finish_ingest(
        self,
        lease: Lease,
        rows_total: int,
        models: Mapping[str, Any],
        from_row: int | None = None,
    ) -> None:
        """The input is read. `models` (fingerprints) is kept in the job's report.

        Moves to RUN, or straight to PUBLISH when no group is left to do. `from_row` as above.
        """
        ...

    def pin_models(self, lease: Lease, models: Models) -> None:
        """Write down which models decide the job, once and for all, unless that is known.

        Needs the lease of INGEST. Raises `ModelChangedError` where others are pinned. Jobs that
        are older than fingerprints stay without.
        """
        ...

    def pause_ingest(self, lease: Lease, most_open: int) -> int:
        """How many groups may be added before this is to be asked again, at least 1; or 0.

        0: as many as `most_open` are open, so the lease was given back, and INGEST is neither due
        nor claimed until half of that are (`rules.resumes_at`). With the cancel flag it is never 0.
        """
        ...

    def note_report(self, lease: Lease, values: Mapping[str, Any]) -> None:
        """Put values into the report of a job that is held; known keys are replaced."""
        ...

    # --- groups -----------------------------------------------------------------------------
    def advance(
        self,
        lease: Lease,
        to: Stage,
        artefact: Artefact | None,
        timing: StageTiming,
        spent: Spent | None = None,
    ) -> None:
        """PROPOSE → VERIFY with a drafts file (or None), VERIFY → RECORD with a results file.

        Ends the lease, resets attempts, adds the timing (queue seconds: ready to claimed). `spent`
        is the attempt's time on a device, which counts as kept. Raises `SessionEndedError`, and
        changes nothing, when that session has ended.
        """
        ...

    def commit_group(
        self,
        lease: Lease,
        completions: Sequence[CompletionRecord],
        timing: StageTiming,
        report: Mapping[str, float],
    ) -> Stage | None:
        """One transaction: completions (unique on job, row, sample), group DONE, totals, report.

        `report` values are added, key by key, to the job's report. When it was the last group and
        ingest is done, the job moves to PUBLISH. Log probabilities are kept in single precision.
        Returns what is due of the job because of it (`rules.due_after`), if anything.
        """
        ...

    def keep_part(
        self,
        lease: Lease,
        completions: Sequence[CompletionRecord],
        timing: StageTiming,
        report: Mapping[str, float],
        spent: Spent | None = None,
    ) -> None:
        """`cancel_group` for one that has some rows finished: they are kept, the totals count them.

        One transaction, as `commit_group`; `spent` as with `advance`. Values of the report that are
        no numbers are put into the job's. The completions are those of rows that are finished in
        all their samples; after `retry_job` the others alone are to be done.
        """
        ...

    def kept_rows(self, job_id: str, index: int | None = None) -> set[int]:
        """The finished rows of groups that `keep_part` has kept some of, of one or of all."""
        ...

    # --- publish ----------------------------------------------------------------------------
    def completions(
        self, job_id: str, batch: int = 1000, details: bool = True
    ) -> Iterator[CompletionRecord]:
        """All completions by (row, sample), streamed.

        Without `details` what no output tells is left empty: origins, counts by depth, and
        log-probabilities that nobody asked for.
        """
        ...

    def rejected(self, job_id: str) -> Iterator[RejectedRow]:
        """Quarantined rows, by row. Failed groups are told by `failed_groups`."""
        ...

    def failed_groups(self, job_id: str) -> list[tuple[int, str, Prompts, str]]:
        """(index, failed or cancelled, prompts, last error) of unfinished groups, by index.

        Groups that were cut off from others come last, whatever their rows. A FAILED group of a
        single row is a quarantined row.
        """
        ...

    def prompts_of(self, job_id: str, index: int) -> Prompts | None:
        """Where the prompts of a group lie; None when there is no such group."""
        ...

    def finish_job(
        self,
        lease: Lease,
        state: JobState,
        error: str | None = None,
        manifest: PublishedManifest | None = None,
    ) -> None:
        """End a published job. DONE, PARTIAL, FAILED or CANCELLED. The log tells its manifest."""
        ...

    # --- what drafting taught ---------------------------------------------------------------
    def note_decisions(self, job_id: str, decisions: Sequence[Decision]) -> None:
        """Append decisions. Raises `StoreError` when there is no such job; none: nothing happens.

        No lease is needed: they are an account of what was done, whoever holds the work now.
        """
        ...

    def decisions(self, job_id: str) -> list[Decision]:
        """By time; of the same time as they were noted."""
        ...

    def keep_knowledge(self, key: str, state: Mapping[str, Any]) -> None:
        """Keep what was learned of a machine, as JSON; the last writer wins.

        `key` says in words what it is true of: device, models, dtype.
        """
        ...

    def knowledge(self, key: str) -> Mapping[str, Any] | None:
        """What was kept last; None when nothing was."""
        ...

    def learn_acceptance(
        self, tenant: str, job_name: str, counts: Sequence[AcceptanceCount]
    ) -> None:
        """Add counts to what is known of jobs of this name.

        A sum of more than `rules.MOST_TESTED` tested tokens is scaled down to that, so that newer
        nights weigh more. Nothing is lost when several workers add at once. An empty tag is none.
        """
        ...

    def acceptance(self, tenant: str, job_name: str) -> list[AcceptanceCount]:
        """What is known of jobs of this name, by (proposer, tag)."""
        ...

    def past_outputs(
        self, tenant: str, job_name: str, vocabulary: str, max_tokens: int, except_job: str
    ) -> Iterator[PastOutput]:
        """Finished completions of this tenant's other jobs, streamed. Never another tenant's.

        Of jobs whose report has this `VOCABULARY`; jobs of the same name first, then the others,
        of each the newest first, each by (row, sample). Ends before the one with which all token
        ids would be more than `max_tokens`. `except_job` is the job that asks. Outputs of which not
        every token was kept are passed by.
        """
        ...

    def close(self) -> None: ...
