"""What a store must do. `SqlStore` does it; one test body runs on SQLite and PostgreSQL.

Every write that follows a claim names the lease with its fencing token, and raises `FencedError`
when it is no longer current. Times are seconds since the epoch by the store's own clock.

**Device time.** A *session* is one device in one worker process. Its time is kept as counters: what
each attempt at a group used of it, by kind, and what nobody used, idle or overhead. Every report
carries cumulative counters, and the larger value stays. So it does not matter how often a counter
is reported, in which order, by which thread, or whether the answer got lost: no time is counted
twice, and a worker keeps no list of unreported time. It balances after crashes too:

1. A session ends once, in a transaction that locks its row: `leased` becomes the larger of when it
   was last seen and the sum of its counters, `lost` the difference. From then on none of its
   counters changes, so leased = idle + overhead + lost + what attempts used, for ever.
2. The writes that keep an attempt's results (`advance`, `keep_part`) carry its time in the same
   transaction. So where rows have device time, the session has it too, whoever dies afterwards.
   They mark the attempt as kept; the time of all others is lost.
3. A process that was taken for dead cannot write to its session any more. It begins another one
   where that one ended: `runtime/device_time.py`.

**What else attempts use** (`schemas/usage.py`): processor time, statements, requests, bytes. The
writes that keep results carry the attempt's meter, and store what it says in the same transaction,
as kept. Heartbeats and the ends of failed attempts report the rest, which is lost unless a later
write keeps it.

**Audit log.** The other methods write it, in the transaction of what they do. Each entry names an
actor: the owner of the lease, else whom the store works for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from specbatch.pipeline.audit.accounts import AccountRows
from specbatch.pipeline.ledger.budgeting import Budgeting
from specbatch.pipeline.ledger.earlier import Earlier
from specbatch.pipeline.ledger.placing import Placing
from specbatch.pipeline.ledger.serving import Serving
from specbatch.pipeline.ledger.staging import Staging
from specbatch.schemas.audit import (
    AuditRecord,
    Correctness,
    EntryKind,
    Head,
    KeptCompletion,
    KeptGroup,
    LogEntry,
    PublishedManifest,
)
from specbatch.schemas.backlog import Backlog
from specbatch.schemas.days import DAY_SEC
from specbatch.schemas.draft_switches import DraftSwitch, SwitchScope
from specbatch.schemas.figures import SlowFalls, StoreFigures
from specbatch.schemas.fingerprint import Models
from specbatch.schemas.job_figures import GroupFigures, RowFigures
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.notifications import Due, NotificationRow
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.policies import Decided, Place, Reviews
from specbatch.schemas.provenance import Ticks
from specbatch.schemas.records import (
    Artefact,
    Beat,
    CompletionRecord,
    DueWork,
    GroupWork,
    JobRow,
    JobState,
    JobWork,
    Lease,
    NewGroup,
    NewJob,
    Prompts,
    RejectedRow,
    Released,
    SourcePosition,
    Stage,
    StageTiming,
)
from specbatch.schemas.registry import Deployment, DeployScope, ModelVersion, NewModel, PairTrial
from specbatch.schemas.rollouts import Observed, Rollout
from specbatch.schemas.schedules import RUNS, RunState, ScheduleRun
from specbatch.schemas.speculation import AcceptanceCount, AcceptanceDay, Decision
from specbatch.schemas.timekeeping import (
    Attempt,
    JobTime,
    NewSession,
    RowTime,
    SessionRow,
    SessionTime,
    Spent,
    TimeSlice,
)
from specbatch.schemas.usage import StageUsage, UsageMeter

AUDITED_SEC = 30 * DAY_SEC  # `figures` counts audits for so long
MISSED_SEC = 7 * DAY_SEC  # and so do times that a schedule missed
FOUND_SEC = 2 * DAY_SEC  # what a schedule's newest run found counts for so long
SUCCESS_SEC = 35 * DAY_SEC  # and its last success: longer than any month and who notices it
MOST_JOBS = 10_000  # of one answer of `ended_jobs`


class Store(Serving, Budgeting, Earlier, Placing, Staging, Protocol):
    """Jobs, groups, leases, completions, what drafting taught, schedules, the audit log, time."""

    # --- jobs -------------------------------------------------------------------------------
    def create_job(self, job: NewJob) -> tuple[JobRow, bool]:
        """Insert a job. A known idempotency key returns its job and False.

        Raises `IdempotencyError`, which names the fields that differ, for another spec digest. The
        same holds for a known `job_id`.
        """

    def get_job(self, job_id: str) -> JobRow:
        """By its id or a unique prefix of 6 characters or more. Raises `JobNotFoundError`."""

    def job_of_key(self, key: str) -> JobRow | None:
        """The job that was created with this idempotency key, if any."""

    def list_jobs(self, limit: int = 50, state: JobState | None = None) -> list[JobRow]:
        """Newest first."""

    def progress(self, job_id: str) -> JobProgress: ...

    def request_cancel(self, job_id: str, reason: str | None = None) -> JobRow:
        """Set the cancel flag. Groups that are not leased become CANCELLED at once.

        A final job is returned unchanged. When nothing is left to do the job moves to PUBLISH. The
        job keeps the first reason it was given.
        """

    def stop_overdue(self) -> set[str]:
        """Cancel live jobs whose deadline has passed or whose budget is spent; return their ids. So
        are those that a budget of their tenant never covers. A job's own pays for attempts that
        were kept and for those in flight."""

    def cancelled_jobs(self, spent_usd: Mapping[Lease, float]) -> set[str]:
        """The leases' jobs that have the cancel flag, after `stop_overdue` on these jobs.

        Each lease comes with the cost of its attempt so far. The call extends no lease, and writes
        only where a job has a limit, so it may be made often.
        """

    def retry_job(
        self,
        job_id: str,
        quarantined: bool = False,
        numeric_class: str | None = None,
        models: Models | None = None,
    ) -> int:
        """Send FAILED and CANCELLED groups (and a failed ingest) back to work; return how many.

        Raises `UsageError` unless the job is final, or `numeric_class` or `models` is given.
        Clears the cancel flag, the error and limits that were reached; the state is RUNNING. A
        group restarts at RECORD when it has results, at VERIFY when it has drafts, else at its
        first stage, ingest at its cursor. A FAILED or CANCELLED job whose groups are all done
        returns to PUBLISH, which counts as one. A job with nothing to send back does not change.

        `quarantined` sends back FAILED groups of a single row and nothing else. It raises
        `UsageError` when the input was not read to its end.

        With `numeric_class` and `models` unfinished groups are verified from now on, also those of
        a running job: holders of groups at VERIFY lose their leases, and the call returns how many
        groups are to be verified. It raises `UsageError` for a class that contradicts the job's
        spec, and for a model that would read the prompts as other tokens.
        """

    def reviews(self, job_id: str) -> Reviews:
        """The completions of a job that policies hold back for review, and what was decided."""

    def review_job(self, job_id: str, decided: Mapping[Place, Decided], by: str = "") -> None:
        """Decide on held completions, and send the job to PUBLISH again. Raises `UsageError` for
        one that is not held or was decided on, and for a job without an output. `by`: the actor."""

    def fail_job(self, lease: Lease, error: str) -> None:
        """End the job as FAILED: its input or model cannot be used. Needs a job lease.

        Its open groups become CANCELLED. Their holders learn it from the next heartbeat.
        """

    # --- claims and leases ------------------------------------------------------------------
    def claim_job(self, job_id: str, stage: Stage, owner: str, lease_sec: float) -> JobWork | None:
        """Claim the job's INGEST or PUBLISH; None when it is leased or at another stage.

        The first claim of INGEST starts the job (RUNNING, `started_at`). A job with the cancel flag
        leaves INGEST instead: for PUBLISH, or for RUN while groups are open. A paused INGEST cannot
        be claimed until few enough groups are open. A job whose attempts are used up becomes FAILED
        instead. Attempts count from the last `add_groups`.
        """

    def claim_group(
        self,
        job_id: str,
        index: int,
        stage: Stage,
        owner: str,
        lease_sec: float,
        serves: Serves | None = None,
    ) -> GroupWork | None:
        """Claim a group at `stage`; None when it is held or at another stage.

        One statement raises the fencing token and the attempt count. A group whose attempts are
        used up (`max_attempts` of the store) becomes FAILED instead; at PROPOSE it moves to VERIFY
        without drafts, for a draft is only a hint. A group of a job with the cancel flag becomes
        CANCELLED instead, except at RECORD, where its work is finished.

        A group of several rows whose attempts are used up at VERIFY or RECORD is split in halves
        (`split_rules`) instead of failing, and the claim takes the first half. An owner who holds a
        group that may kill workers (`split_rules.is_suspect`) gets no other such group.

        `serves` is what the owner verifies with. A job without a numeric class pins one for good:
        the one that most live workers of its model offer. A group of a job with another class than
        the owner's is refused. With None, classes are ignored.
        """

    def claim_next(
        self,
        stage: Stage,
        model: str,
        owner: str,
        lease_sec: float,
        serves: Serves | None = None,
        jobs: Collection[str] | None = None,
    ) -> GroupWork | None:
        """Claim the next group at PROPOSE or VERIFY in fair-share order; None when there is none.

        Only jobs that name `model` for that stage and have no cancel flag count. By `fair_share`,
        the tenant that was served least goes first, then its job of the highest priority, then the
        group with most prompt tokens (the lowest index of several). The tenant is charged.
        Groups whose attempts are used up are skipped: `close_over` and `claim_group` close those.
        `serves` as in `claim_group`; jobs of other classes are skipped, as are all but `jobs`.
        """

    def close_over(self, limit: int = 1000) -> int:
        """Close free groups that nobody may claim any more, as `claim_group` would; count them."""

    def heartbeat(self, leases: Sequence[Lease], lease_sec: float) -> Beat:
        """Extend leases. Returns lost leases, cancelled jobs and the leases to split."""

    def release(
        self, lease: Lease, error: str, forgiven: bool = False, whole: bool = False
    ) -> Released:
        """Give a unit back after an error: ready again, or FAILED when attempts are used up.

        `forgiven` does not count the attempt: the worker was stopped, the work is not at fault. A
        group of several rows at VERIFY or RECORD is split in halves instead of failing, unless its
        job is cancelled, some of its rows were kept (`keep_part`), or `whole` says that no single
        row caused the error.

        At PROPOSE, a group without attempts moves to VERIFY without drafts. A lost lease is
        ignored. A job lease (INGEST, PUBLISH) without attempts fails the job. With the cancel flag,
        a group becomes CANCELLED (except at RECORD) and the job leaves INGEST.
        """

    def cancel_group(self, lease: Lease) -> None:
        """End a group as CANCELLED: its worker stopped because the job was cancelled.

        After the last open group the job moves to PUBLISH, unless its input is still being read.
        """

    def split_group(self, lease: Lease, keep: int) -> int:
        """Split a group held at VERIFY: its holder keeps the first `keep` rows.

        The other rows become a new group, ready at VERIFY with all attempts; returns its index. The
        lease stays valid. Raises `ValueError` unless both parts have rows.
        """

    def ask_for_split(
        self,
        model: str,
        owner: str,
        serves: Serves | None = None,
        jobs: Collection[str] | None = None,
    ) -> tuple[str, int] | None:
        """`owner` has nothing to verify with `model`: ask another worker to split its group.

        The request goes to the group with most rows that others hold at VERIFY, of several to the
        one claimed last; its holder learns it from heartbeats. Each group is asked once per claim
        or split. Returns its job and index. Returns None while any group is due at VERIFY for the
        model. Jobs whose input is still read, that have groups at PROPOSE, or that are cancelled,
        are skipped. With `serves` or `jobs`, others than theirs do not count.
        """

    def due(self, limit: int = 256, job_id: str | None = None) -> list[DueWork]:
        """Units that are ready, or whose lease has run out: the sweeper enqueues these.

        Jobs first, then groups; of each stage, model and priority the `limit` that are ready
        longest. With `job_id`, only units of that job.
        """

    def holders(self, job_id: str) -> list[str]:
        """The owners of current leases on the job or its groups, sorted."""

    def expire_leases(self, job_id: str, owner: str) -> int:
        """End a dead owner's leases on the job and its groups; return how many.

        They run out now: attempts count, and others may claim at once.
        """

    def skip_proposals(self, patience_sec: float) -> list[tuple[str, int]]:
        """Move groups that waited too long for drafts to VERIFY; return (job id, index).

        These groups are free at PROPOSE, and were ready or lost their holder more than
        `patience_sec` ago. A job is skipped while one of its groups is held at PROPOSE or left it
        within that time: groups behind a busy proposer wait. The call raises their fencing tokens,
        so that a late proposer is fenced, and resets their attempts.
        """

    # --- ingest -----------------------------------------------------------------------------
    def add_groups(
        self,
        lease: Lease,
        groups: Sequence[NewGroup],
        rejected: Sequence[RejectedRow],
        next_row: int,
        cursor: SourcePosition,
        from_row: int | None = None,
        usage: UsageMeter | None = None,
    ) -> None:
        """Add groups, quarantined rows and the next reading position in one transaction.

        Raises `StoreError` unless group indexes continue from the last one. Groups of a job with
        the cancel flag start as CANCELLED. `from_row` is where the reader expects its earlier
        groups to end. Raises `FencedError` where they do not: the store was restored from a copy
        that lacks some.
        """

    def finish_ingest(
        self,
        lease: Lease,
        rows_total: int,
        models: Mapping[str, Any],
        from_row: int | None = None,
        usage: UsageMeter | None = None,
    ) -> None:
        """End ingest. The job's report keeps `models` (fingerprints).

        The job moves to RUN, or to PUBLISH when no group is open. `from_row` as in `add_groups`.
        """

    def pin_models(self, lease: Lease, models: Models) -> None:
        """Pin the models that decide the job, for good, unless they are pinned.

        Needs the lease of INGEST. Raises `ModelChangedError` where others are pinned. Jobs older
        than fingerprints stay without.
        """

    def pause_ingest(self, lease: Lease, most_open: int, usage: UsageMeter | None = None) -> int:
        """How many groups may be added before the next call, at least 1; or 0.

        0 means that `most_open` groups are open: the lease was given back, and INGEST is neither
        due nor claimable until half of them are open (`rules.resumes_at`). It is never 0 with the
        cancel flag.
        """

    def note_report(self, lease: Lease, values: Mapping[str, Any]) -> None:
        """Set values in the report of a leased job. Known keys are replaced."""

    # --- groups -----------------------------------------------------------------------------
    def advance(
        self,
        lease: Lease,
        to: Stage,
        artefact: Artefact | None,
        timing: StageTiming,
        spent: Spent | None = None,
        usage: UsageMeter | None = None,
    ) -> None:
        """PROPOSE → VERIFY with a drafts file (or None), VERIFY → RECORD with a results file.

        Ends the lease, resets attempts and adds the timing (queue seconds: ready to claimed).
        `spent` is the attempt's device time, which counts as kept. Raises `SessionEndedError` and
        changes nothing when that session has ended.
        """

    def commit_group(
        self,
        lease: Lease,
        completions: Sequence[CompletionRecord],
        timing: StageTiming,
        report: Mapping[str, float],
        usage: UsageMeter | None = None,
    ) -> Stage | None:
        """Store completions (unique on job, row, sample), end the group as DONE, add to totals.

        It is one transaction. Values of `report` are added, key by key, to the job's report. After
        the last group of an input that was read the job moves to PUBLISH. Log-probabilities are
        stored in single precision. Returns the job's stage that became due (`rules.due_after`).
        """

    def keep_part(
        self,
        lease: Lease,
        completions: Sequence[CompletionRecord],
        timing: StageTiming,
        report: Mapping[str, float],
        spent: Spent | None = None,
        usage: UsageMeter | None = None,
    ) -> None:
        """`cancel_group` for a group with finished rows: these are stored and counted.

        It is one transaction, as in `commit_group`; `spent` as in `advance`. Values of the report
        that are no numbers replace the job's. The completions belong to rows whose samples are all
        finished; after `retry_job` only the other rows are left to do.
        """

    def kept_rows(self, job_id: str, index: int | None = None) -> set[int]:
        """The finished rows of groups that `keep_part` stored rows of: of one group or of all."""

    # --- publish ----------------------------------------------------------------------------
    def completions(
        self,
        job_id: str,
        batch: int = 1000,
        details: bool = True,
        first_row: int = 0,
        before_row: int | None = None,
    ) -> Iterator[CompletionRecord]:
        """All completions by (row, sample), streamed, or those of some rows.

        Without `details`, fields that no output shows stay empty: origins, counts by depth, and
        log-probabilities that nobody asked for.
        """

    def rejected(
        self, job_id: str, batch: int = 1000, first_row: int = 0, before_row: int | None = None
    ) -> Iterator[RejectedRow]:
        """Quarantined rows, by row, without those of failed groups (`failed_groups`)."""

    def failed_groups(self, job_id: str) -> list[tuple[int, str, Prompts, str]]:
        """(index, failed or cancelled, prompts, last error) of unfinished groups, by index.

        Groups that were split off come last, whatever their rows. A FAILED group of a single row
        is a quarantined row.
        """

    def prompts_of(self, job_id: str, index: int) -> Prompts | None:
        """Where the prompts of a group are stored; None when there is no such group."""

    def finish_job(
        self,
        lease: Lease,
        state: JobState,
        error: str | None = None,
        manifest: PublishedManifest | None = None,
        usage: UsageMeter | None = None,
    ) -> None:
        """End a published job as DONE, PARTIAL, FAILED or CANCELLED. The log names its manifest."""

    # --- what drafting taught ---------------------------------------------------------------
    def note_decisions(self, job_id: str, decisions: Sequence[Decision]) -> None:
        """Append decisions. Raises `StoreError` when there is no such job.

        No lease is needed: decisions record what was done, whoever holds the work now.
        """

    def decisions(self, job_id: str) -> list[Decision]:
        """By time, then in the order in which they were noted."""

    def keep_knowledge(self, key: str, state: Mapping[str, Any]) -> None:
        """Store what is known of a machine as JSON. The last writer wins.

        `key` says in words what it describes: device, models, dtype.
        """

    def knowledge(self, key: str) -> Mapping[str, Any] | None:
        """What was stored last for this key; None when there is nothing."""

    def learn_acceptance(
        self, tenant: str, job_name: str, counts: Sequence[AcceptanceCount]
    ) -> None:
        """Add counts to the acceptance of jobs of this name.

        A sum of more than `rules.MOST_TESTED` tested tokens is scaled down to that, so that newer
        runs weigh more. Nothing is lost when several workers add at once. An empty tag is none.
        The same transaction adds to the day's counts, by the store's clock.
        """

    def acceptance(self, tenant: str, job_name: str) -> list[AcceptanceCount]:
        """The acceptance of jobs of this name, by (proposer, tag)."""

    def acceptance_days(self, tenant: str, job_name: str) -> list[AcceptanceDay]:
        """The same for each day that is kept, by (proposer, tag, day). A proposer's confidence
        buckets are one."""

    def slow_falls(self) -> SlowFalls:
        """The test of `policy/slow_fall.py` of jobs that ran lately; some seconds of work."""

    def supersede_acceptance(self, tenant: str, job_name: str) -> int:
        """Accept the acceptance of today and later as the baseline of jobs of this name.

        Days before it stay and are marked. Returns how many rows were not marked before.
        """

    def forget_old_acceptance(self, keep_days: int) -> int:
        """Delete days that are older; returns how many rows."""

    # --- the model registry -------------------------------------------------------------------
    def add_model(self, model: NewModel) -> tuple[ModelVersion, bool]:
        """Register a model under the next version of its name; the version, and whether it is new.

        Files that are registered already keep the name and version that they have.
        """

    def models(self) -> list[ModelVersion]:
        """By name and version."""

    def deployments(self, history: bool = False) -> list[Deployment]:
        """Which models draft for whom now; with `history` all there ever were, in order."""

    def promote(self, fingerprint: str, scope: DeployScope, reason: str) -> Deployment:
        """Let a model draft for a scope in the place of the one that does.

        Raises `UsageError` for a model that is not registered or retired, and where somebody else
        does the same at this moment.
        """

    def roll_back(self, scope: DeployScope, reason: str) -> Deployment | None:
        """Let the model before the present one draft again; None: there is none.

        Raises `UsageError` where no model is deployed.
        """

    def retire(self, fingerprint: str) -> ModelVersion:
        """A retired model cannot be promoted. Raises `UsageError` while it is deployed."""

    def add_pair_trial(self, trial: PairTrial) -> PairTrial:
        """Store what a trial showed, in the place of an earlier one of the pair and class."""

    def pair_trials(self) -> list[PairTrial]:
        """Of all pairs, the oldest first."""

    # --- rollouts of draft models -------------------------------------------------------------
    def begin_rollout(
        self, fingerprint: str, scope: DeployScope, steps: Sequence[float], reason: str
    ) -> Rollout:
        """Let a candidate draft for a growing share of a scope's groups.

        Raises `UsageError` where no model is deployed, or a rollout continues.
        """

    def rollouts(self, history: bool = False) -> list[Rollout]:
        """Those that count now; with `history` all there ever were, in order."""

    def rollout_groups(self, number: int) -> list[Observed]:
        """What a rollout's groups showed, in the order in which they ended."""

    def observe_rollout(
        self, number: int, job_id: str, group_index: int, seen: Observed
    ) -> Rollout:
        """Note what a group showed, once; `policy/rollout.py` says whether the rollout ends.

        A worse candidate drafts no more. A better one drafts for all groups until it is promoted.
        """

    def stop_rollout(self, scope: DeployScope, reason: str) -> Rollout:
        """Raises `UsageError` where there is none."""

    def settle_rollouts(self) -> list[Rollout]:
        """Promote the candidates that turned out better; one that has been retired meanwhile is
        stopped, and so is one whose present model serves no more. Retire those that turned out
        worse and draft for nobody. Returns the rollouts that were promoted or STOPPED, but for
        those that a promotion of this call has stopped."""

    # --- drafting switched off by an operator -----------------------------------------------
    def switch_drafting_off(self, scope: SwitchScope, reason: str) -> tuple[DraftSwitch, bool]:
        """Switch drafting off for a scope. False: it was off already, and stays as it was."""

    def switch_drafting_on(self, scope: SwitchScope) -> DraftSwitch | None:
        """End the switch of exactly this scope; None when there is none."""

    def draft_switches(self, history: bool = False) -> list[DraftSwitch]:
        """What is switched off now, the oldest first; with `history` all that ever was."""

    # --- device time ------------------------------------------------------------------------
    def begin_session(self, session: NewSession) -> None:
        """Start to account for a device's time. A known session does not change."""

    def announce(self, session_id: str, serves: Serves) -> None:
        """Change what a session verifies with. An unknown session is ignored."""

    def report_time(self, session: SessionTime, attempts: Mapping[Attempt, Ticks]) -> None:
        """Report a live session's cumulative counters.

        Raises `SessionEndedError` and changes nothing when it has ended.
        """

    def end_session(self, session: SessionTime, attempts: Mapping[Attempt, Ticks]) -> None:
        """The last report. A session that has ended does not change."""

    def end_silent_sessions(self, patience_sec: float) -> list[str]:
        """End sessions that were silent for so long; return their ids.

        Each session ends at its last report.
        """

    def sessions(
        self, job_id: str | None = None, session_id: str | None = None
    ) -> list[SessionRow]:
        """All sessions, those that a job used, or one; oldest first."""

    def time_slices(
        self, job_id: str | None = None, session_id: str | None = None
    ) -> Iterator[TimeSlice]:
        """The time that attempts used, by job, group, fencing token and session."""

    def job_times(self, job_id: str | None = None) -> Sequence[JobTime]:
        """Sums of time slices of one job or of all, by job."""

    def row_times(self, job_id: str | None = None) -> Sequence[RowTime]:
        """Sums of the completions' time of one job or of all, by job and tag."""

    # --- what else attempts used --------------------------------------------------------------
    def report_usage(self, meters: Mapping[Lease, UsageMeter]) -> None:
        """Store what these attempts used so far, kept or not. Counters only grow."""

    def stage_usage(self, job_id: str | None = None) -> Sequence[StageUsage]:
        """Sums of what attempts used at one job or at all, by job and stage."""

    # --- notifications ----------------------------------------------------------------------
    def due_notifications(
        self, targets: Collection[str], limit: int = 8, job_id: str | None = None
    ) -> list[Due]:
        """Those of these targets whose next attempt is due, the longest due first.

        One is queued for each target of a job's spec in the transaction that ends or stops it.
        """

    def take_notification(self, one: Due, for_sec: float) -> bool:
        """Whether this caller may send it now, as also what is put off; for `for_sec` nobody else
        may."""

    def note_sent(self, one: Due) -> None:
        """Its target has it."""

    def note_not_sent(self, one: Due, error: str, again_sec: float | None) -> None:
        """Note why not. The next attempt is due in `again_sec` seconds; None: there is none."""

    def notifications_of(self, job_id: str) -> list[NotificationRow]:
        """All of a job, in the order of its events."""

    # --- schedules --------------------------------------------------------------------------
    def note_schedule_run(self, run: ScheduleRun, replaces: Collection[RunState] = ()) -> bool:
        """Note the result of a logical time; whether it was noted.

        A time that has a row keeps it, unless that row's state is one of `replaces`. Of several
        callers at once exactly one succeeds. `noted_at` is the store's own time.
        """

    def note_schedule_runs(
        self, runs: Sequence[ScheduleRun], then: Sequence[ScheduleRun] = ()
    ) -> list[ScheduleRun]:
        """Note several times that have no rows, in one transaction; return those noted.

        If there are any, rows of `then` replace queued ones, and are returned as well.
        """

    def claim_schedule_run(self, run: ScheduleRun) -> ScheduleRun | None:
        """Begin an attempt at a queued time, or at one whose attempt was not heard of for
        `RUN_LEASE_SEC`. None: it is not to be had.
        """

    def hold_schedule_run(self, run: ScheduleRun) -> bool:
        """Write state and reason of the attempt that `run.started_at` names, and that it lives.

        False, and nothing is written: it is not this attempt's any more.
        """

    def schedule_runs(
        self,
        name: str | None = None,
        limit: int = 100,
        states: Collection[RunState] = RUNS,
        logical_at: float | None = None,
        by_noted: bool = False,
        upto: float | None = None,
    ) -> list[ScheduleRun]:
        """The newest times of a schedule or of all; equal times by the schedule's name.

        `logical_at` selects one time, `upto` leaves out later ones. `by_noted` orders by when they
        were noted.
        """

    # --- figures ----------------------------------------------------------------------------
    def figures(self) -> StoreFigures:
        """The backlog, and recent audits and schedules. Cheap enough for every few seconds.

        A schedule has a figure from its first check on, so that its first loss shows as a rise. A
        paused one has no last success, and no figure if it lost nothing lately.
        """

    def backlog(self) -> Backlog:
        """What waits and who works now. It reads jobs that are not over, their groups' totals, and
        open sessions."""

    def group_figures(self, job_id: str) -> Iterator[GroupFigures]:
        """Figures of all groups of a job, by index, a page at a time."""

    def row_figures(self, job_id: str, batch: int = 1000) -> Iterator[RowFigures]:
        """Figures of all completions of a job by (row, sample), a page at a time. Text cannot be
        rebuilt from them, so a purge leaves them."""

    # --- audits -----------------------------------------------------------------------------
    def note_action(self, job_id: str, kind: EntryKind, payload: Mapping[str, Any]) -> Head:
        """Only log what this store's user did with a job. Raises `JobNotFoundError`."""

    def log(self, job_id: str, after: int = 0, batch: int = 64) -> Iterator[LogEntry]:
        """The entries of a job's log after number `after`, in order, streamed."""

    def log_head(self, job_id: str) -> Head:
        """The end of the log by the job's row; an empty log's when there is no such job."""

    def logged_job(self, job_id: str) -> str:
        """The whole id of a job that has a row or a log, by id or a unique prefix.

        Raises `JobNotFoundError`. It does not read the row's other columns.
        """

    def job_facts(self, job_id: str) -> Mapping[str, Any] | None:
        """The readable columns of a job's row by name, read without trust; None without a row."""

    def kept(self, job_id: str, batch: int = 500) -> Iterator[KeptCompletion]:
        """All completions with their digests by (row, sample), read without trust."""

    def kept_one(self, job_id: str, row: int, sample: int) -> KeptCompletion | None:
        """One of these completions; None when there is none."""

    def groups(self, job_id: str) -> Iterator[KeptGroup]:
        """All groups by index, with the place of their prompts and how they ended."""

    def accounts(self, job_id: str) -> AccountRows:
        """A job's figures, device time and decisions, read without trust.

        Raises `ValueError`, `TypeError`, `KeyError` or `StoreError` where they cannot be read.
        """

    def keep_audit(self, audit: AuditRecord) -> None:
        """Store the findings of an audit."""

    def audits(self, job_id: str) -> list[AuditRecord]:
        """All audits of a job with their findings, the oldest first."""

    def correctness(self, since: float = 0.0) -> Correctness:
        """Completions of all jobs that audits since then replayed, and how many differed."""

    # --- privacy ----------------------------------------------------------------------------
    def recorded_groups(self, job_id: str) -> list[tuple[int, Prompts, Artefact | None]]:
        """(index, prompts, results) of groups with completions, in the order of their rows.

        Groups of which only some rows were kept (`keep_part`) have no results.
        """

    def ended_jobs(
        self,
        age_sec: float,
        tenant: str | None = None,
        limit: int = MOST_JOBS,
        private_only: bool = False,
        after: JobRow | None = None,
        within_sec: float | None = None,
    ) -> list[JobRow]:
        """Jobs that ended at least so long ago, and at most `within_sec`, and are not wholly
        purged, oldest first.

        `private_only` selects jobs whose texts are not kept. `after` is the last job of the page
        before.
        """

    def purge(
        self, job_id: str, why: str, batch_rows: int = 1000, unfinished: bool = False
    ) -> Iterator[int]:
        """Empty the stored texts of an ended job.

        Yields how many rows are done: first when the job is marked, then after each batch. A job
        that was wholly purged before yields nothing.

        It empties a completion's row id, text, token ids, log-probabilities, rejected drafts and
        error; a quarantined row's id and reason; the job's sealed spec; errors of units. Tags,
        counts, origins, times, costs, digests and the audit log stay. The log first notes the purge
        and `why`. From then on the job cannot be retried. Each batch is a transaction: an
        interrupted purge resumes where it stopped. With `unfinished` all rows are emptied, but the
        job stays due, because other data of it remains.

        Raises `UsageError` for a job that has not ended.
        """

    def close(self) -> None: ...
