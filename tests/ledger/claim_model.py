"""What a store must answer about claims, leases and fencing tokens, in plain Python.

The oracle of `test_store_machine.py`. It knows no SQL, money or texts, and one tenant whose jobs
come one after another. Methods take the store's arguments and answer with what `facts` leaves of
the store's answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbatch.schemas.errors import FencedError, UsageError
from specbatch.schemas.records import (
    Beat,
    CompletionRecord,
    JobState,
    Lease,
    NewGroup,
    NewJob,
    Released,
    Stage,
)

OPEN = (Stage.PROPOSE, Stage.VERIFY, Stage.RECORD)
CANCELLABLE = (Stage.PROPOSE, Stage.VERIFY)
CLOSED = (Stage.FAILED, Stage.CANCELLED)
FIRST_SPLIT_INDEX = 1 << 24


@dataclass
class Unit:
    """A job or a group: what can be claimed."""

    stage: Stage
    ready_at: float
    token: int = 0  # the fencing token: every claim raises it
    owner: str | None = None
    lease_until: float = 0.0
    attempts: int = 0
    has_error: bool = False

    def is_held_by(self, lease: Lease) -> bool:
        mine = (self.token, self.owner, self.stage)
        return mine == (lease.token, lease.owner, lease.stage)

    def claim(self, owner: str, until: float) -> None:
        self.token, self.attempts = self.token + 1, self.attempts + 1
        self.owner, self.lease_until = owner, until

    def move(self, to: Stage, now: float, attempts: int = 0, has_error: bool = False) -> None:
        self.stage, self.ready_at, self.attempts, self.has_error = to, now, attempts, has_error
        self.owner, self.lease_until = None, 0.0


@dataclass
class Group(Unit):
    file: int = field(kw_only=True)  # which of the planned prompts files its rows are in
    first: int = 0  # its first row there
    rows: int = field(kw_only=True)
    first_stage: Stage = field(kw_only=True)
    has_drafts: bool = False
    has_results: bool = False
    was_cut: bool = False
    split_wanted: bool = False
    waited: float = 0.0
    kept: set[int] = field(default_factory=set)  # rows that a stopped attempt finished
    rows_kept: int = 0

    def is_suspect(self, attempts: int, max_attempts: int) -> bool:
        """Whether its workers may have died of it, before the attempt after so many."""
        last = attempts >= max_attempts - 1
        failed_part = self.was_cut and self.has_error
        return (last and attempts > 0) or (failed_part and (last or self.rows == 1))


@dataclass
class Job(Unit):
    state: JobState = JobState.QUEUED
    cancelled: bool = False
    ingest_done: bool = False
    resumes_at: int | None = None  # with so many open groups a paused ingest resumes
    planned: int = 0
    rejected: int = 0
    groups: dict[int, Group] = field(default_factory=dict)
    completions: set[int] = field(default_factory=set)  # rows

    @property
    def open_groups(self) -> int:
        return sum(group.stage in OPEN for group in self.groups.values())

    def move(self, to: Stage, now: float, attempts: int = 0, has_error: bool = False) -> None:
        Unit.move(self, to, now, attempts, has_error)
        self.resumes_at = None

    def settle(self, now: float) -> None:
        """Publish when no group is left; resume a paused ingest when few enough are."""
        if self.stage is Stage.RUN and not self.open_groups:
            self.move(Stage.PUBLISH, now)
        if self.resumes_at is not None and self.open_groups <= self.resumes_at:
            self.resumes_at = None

    def end(self, state: JobState, now: float) -> None:
        for group in self.groups.values():
            if group.stage in OPEN:
                group.move(Stage.CANCELLED, now, has_error=True)
        self.move(Stage.END, now)
        self.state = state


class ClaimModel:
    """A store of jobs, as dicts."""

    def __init__(self, clock: Callable[[], float], max_attempts: int) -> None:
        self.now, self.max_attempts = clock, max_attempts
        self.jobs: dict[str, Job] = {}

    def unit(self, lease: Lease) -> Unit:
        job = self.jobs[lease.job_id]
        return job if lease.group_index is None else job.groups[lease.group_index]

    def is_current(self, lease: Lease) -> bool:
        return self.unit(lease).is_held_by(lease)

    def _held_job(self, lease: Lease, stage: Stage | None = None) -> Job:
        job = self.jobs[lease.job_id]
        fits = lease.group_index is None and stage in (None, lease.stage)
        if not (fits and job.is_held_by(lease)):
            raise FencedError(lease)
        return job

    def _held_group(self, lease: Lease, *stages: Stage) -> tuple[Job, Group]:
        unit = self.unit(lease)
        if not (isinstance(unit, Group) and unit.is_held_by(lease) and lease.stage in stages):
            raise FencedError(lease)
        return self.jobs[lease.job_id], unit

    # --- jobs -------------------------------------------------------------------------------
    def create_job(self, job: NewJob) -> None:
        self.jobs[job.job_id] = Job(Stage.INGEST, self.now())

    def get_job(self, job_id: str) -> tuple[Any, ...]:
        job = self.jobs[job_id]
        paused = job.resumes_at is not None
        return job.state, job.stage, job.cancelled, paused, len(job.groups)

    def progress(self, job_id: str) -> tuple[Any, ...]:
        job = self.jobs[job_id]
        over = [g for g in job.groups.values() if g.stage in (Stage.DONE, Stage.FAILED)]
        stopped = [g for g in job.groups.values() if g.stage is Stage.CANCELLED]
        done = job.rejected + sum(g.rows for g in over) + sum(g.rows_kept for g in stopped)
        return done, len(over), len(job.completions), job.ingest_done

    def request_cancel(self, job_id: str) -> tuple[Any, ...]:
        job, now = self.jobs[job_id], self.now()
        if not job.state.is_final:
            job.cancelled = True
            for group in job.groups.values():
                if group.stage in CANCELLABLE and group.lease_until <= now:
                    group.move(Stage.CANCELLED, now, has_error=group.has_error)
            if job.stage is Stage.INGEST and job.lease_until <= now:
                job.move(Stage.RUN, now)
            job.settle(now)
        return self.get_job(job_id)

    def cancelled(self, leases: Iterable[Lease]) -> set[str]:
        return {lease.job_id for lease in leases if self.jobs[lease.job_id].cancelled}

    def retry_job(self, job_id: str, quarantined: bool) -> int:
        job, now = self.jobs[job_id], self.now()
        if not job.state.is_final or (quarantined and not job.ingest_done):
            raise UsageError(job_id)
        back = [group for group in job.groups.values() if group.stage in CLOSED]
        if quarantined:
            back = [g for g in back if g.stage is Stage.FAILED and g.rows == 1]
        for group in back:
            again = Stage.VERIFY if group.has_drafts else group.first_stage
            group.move(Stage.RECORD if group.has_results else again, now)
        unpublished = job.state in (JobState.FAILED, JobState.CANCELLED) and not quarantined
        returns = len(back) + (not job.ingest_done or (unpublished and not back))
        if returns:
            job.move(Stage.RUN if job.ingest_done else Stage.INGEST, now)
            job.state, job.cancelled = JobState.RUNNING, False
            job.settle(now)
        return returns

    def fail_job(self, lease: Lease, _error: str) -> None:
        self._held_job(lease).end(JobState.FAILED, self.now())

    def finish_job(self, lease: Lease, state: JobState) -> None:
        self._held_job(lease, Stage.PUBLISH).end(state, self.now())

    def note_report(self, lease: Lease, _values: object) -> None:
        self._held_job(lease)

    # --- ingest -----------------------------------------------------------------------------
    def add_groups(
        self, lease: Lease, groups: Sequence[NewGroup], rejected: Sequence[object], *_: object
    ) -> None:
        job = self._held_job(lease)
        for new in groups:
            stage = Stage.CANCELLED if job.cancelled else new.first_stage
            job.groups[new.index] = Group(
                stage, self.now(), file=new.index, rows=new.rows, first_stage=new.first_stage
            )
        job.planned, job.attempts = job.planned + len(groups), 0
        job.rejected += len(rejected)

    def finish_ingest(self, lease: Lease, *_: object) -> None:
        job = self._held_job(lease)
        job.ingest_done = True
        job.move(Stage.RUN, self.now())
        job.settle(self.now())

    def pause_ingest(self, lease: Lease, most_open: int) -> int:
        job = self._held_job(lease)
        room = most_open - job.open_groups
        if room > 0 or job.cancelled:
            return max(room, 1)
        job.move(Stage.INGEST, self.now())
        job.resumes_at = most_open // 2
        return 0

    # --- claims -----------------------------------------------------------------------------
    def claim_job(self, job_id: str, stage: Stage, owner: str, lease_sec: float) -> Lease | None:
        job, now = self.jobs[job_id], self.now()
        if job.stage is not stage or job.lease_until > now or job.resumes_at is not None:
            return None
        if job.cancelled and stage is Stage.INGEST:
            job.move(Stage.RUN, now)
            job.settle(now)
            return None
        if job.attempts >= self.max_attempts:
            job.end(JobState.FAILED, now)
            return None
        job.claim(owner, now + lease_sec)
        if stage is Stage.INGEST:
            job.state = JobState.RUNNING
        return Lease(job_id, None, stage, job.token, owner, job.attempts)

    def claim_group(
        self, job_id: str, index: int, stage: Stage, owner: str, lease_sec: float
    ) -> tuple[Any, ...] | None:
        job, now = self.jobs[job_id], self.now()
        group = job.groups.get(index)
        if group is None or group.stage is not stage or group.lease_until > now:
            return None
        self._close(job, group)
        if group.stage is not stage or not self._may_claim(group, owner):
            return None
        group.waited = now - max(group.ready_at, group.lease_until)
        group.split_wanted = False
        group.claim(owner, now + lease_sec)
        lease = Lease(job_id, index, stage, group.token, owner, group.attempts)
        suspect = group.is_suspect(group.attempts - 1, self.max_attempts)
        return lease, group.first, group.rows, group.rows_kept, suspect

    def claim_next(
        self, stage: Stage, _model: str, owner: str, lease_sec: float
    ) -> tuple[Any, ...] | None:
        """The longest group that may be claimed, of several the lowest index."""
        free = [
            (-group.rows, index, job_id)
            for job_id, index, group in self._free(stage)
            if not self.jobs[job_id].cancelled and self.jobs[job_id].stage is not Stage.PUBLISH
            if group.attempts < self.max_attempts and self._may_claim(group, owner)
        ]
        if not free:
            return None
        _, index, job_id = min(free)
        return self.claim_group(job_id, index, stage, owner, lease_sec)

    def _free(self, *stages: Stage) -> Iterator[tuple[str, int, Group]]:
        for job_id, job in self.jobs.items():
            for index, group in sorted(job.groups.items()):
                if group.stage in stages and group.lease_until <= self.now():
                    yield job_id, index, group

    def _may_claim(self, group: Group, owner: str) -> bool:
        """Of groups that workers may have died of, nobody holds two at a stage."""
        if group.stage is Stage.PROPOSE:
            return True
        return not group.is_suspect(group.attempts, self.max_attempts) or not any(
            held.is_suspect(held.attempts - 1, self.max_attempts)
            for job in self.jobs.values()
            for held in job.groups.values()
            if (held.owner, held.stage) == (owner, group.stage) and held.lease_until > self.now()
        )

    # --- the end of a lease -----------------------------------------------------------------
    def heartbeat(self, leases: Sequence[Lease], lease_sec: float) -> Beat:
        held = [lease for lease in leases if self.is_current(lease)]
        for lease in held:
            self.unit(lease).lease_until = self.now() + lease_sec
        wanted = {x for x in held if isinstance(g := self.unit(x), Group) and g.split_wanted}
        return Beat(set(leases) - set(held), self.cancelled(leases), wanted)

    def release(self, lease: Lease, _error: str, forgiven: bool, whole: bool) -> Released:
        if not self.is_current(lease):
            return Released(False)
        job, unit, now = self.jobs[lease.job_id], self.unit(lease), self.now()
        unit.attempts -= forgiven
        split_off = None
        if isinstance(unit, Group):
            split_off = self._put_down(job, unit, True, whole)
        elif job.cancelled and job.stage is Stage.INGEST:
            job.move(Stage.RUN, now)
        elif job.attempts >= self.max_attempts:
            job.end(JobState.FAILED, now)
        else:
            job.move(job.stage, now, job.attempts, True)
        job.settle(now)
        return Released(True, split_off)

    def close_over(self) -> int:
        over = [
            (self.jobs[job_id], group)
            for job_id, _, group in self._free(*OPEN)
            if self._without_lease(self.jobs[job_id], group) is not group.stage
        ]
        for job, group in over:
            self._close(job, group)
        return len(over)

    def _close(self, job: Job, group: Group) -> None:
        """Send a free group on, or cut it, when nobody may claim it any more."""
        to = self._without_lease(job, group)
        if to is not group.stage:
            self._put_down(job, group, to is not Stage.CANCELLED or group.has_error, False)
            job.settle(self.now())

    def _without_lease(self, job: Job, group: Group) -> Stage:
        if job.cancelled and group.stage in CANCELLABLE:
            return Stage.CANCELLED
        if group.attempts < self.max_attempts:
            return group.stage
        return Stage.VERIFY if group.stage is Stage.PROPOSE else Stage.FAILED

    def _put_down(self, job: Job, group: Group, has_error: bool, whole: bool) -> int | None:
        """Where a group goes that nobody holds; the index of its second half if it is cut."""
        to, now = self._without_lease(job, group), self.now()
        stays_whole = whole or job.cancelled or group.rows_kept > 0 or group.rows == 1
        if to is Stage.FAILED and not stays_whole:
            index = self._cut(job, group, (group.rows + 1) // 2)
            for half in (group, job.groups[index]):
                spent = 0 if half.rows == 1 else self.max_attempts - 1
                half.move(half.stage, now, spent, has_error)
            group.token += 1
            return index
        group.move(to, now, group.attempts if to is group.stage else 0, has_error)
        return None

    def cancel_group(self, lease: Lease) -> None:
        job, group = self._held_group(lease, *OPEN)
        group.move(Stage.CANCELLED, self.now(), has_error=group.has_error)
        job.settle(self.now())

    def skip_proposals(self, patience_sec: float) -> list[tuple[str, int]]:
        since = self.now() - patience_sec
        skipped = [
            (job_id, index)
            for job_id, index, group in self._free(Stage.PROPOSE)
            if max(group.ready_at, group.lease_until) < since
            if not self._gets_drafts(self.jobs[job_id], since)
        ]
        for job_id, index in skipped:
            group = self.jobs[job_id].groups[index]
            group.move(Stage.VERIFY, self.now(), has_error=group.has_error)
            group.token += 1
        return skipped

    def _gets_drafts(self, job: Job, since: float) -> bool:
        return any(
            g.lease_until > self.now() if g.stage is Stage.PROPOSE else g.ready_at > since
            for g in job.groups.values()
            if g.first_stage is Stage.PROPOSE
        )

    # --- cuts -------------------------------------------------------------------------------
    def split_group(self, lease: Lease, keep: int) -> int:
        job, group = self._held_group(lease, Stage.VERIFY)
        if not 0 < keep < group.rows:
            raise ValueError(keep)
        return self._cut(job, group, keep)

    def _cut(self, job: Job, group: Group, keep: int) -> int:
        index = FIRST_SPLIT_INDEX + len(job.groups) - job.planned
        job.groups[index] = Group(
            group.stage,
            self.now(),
            file=group.file,
            first=group.first + keep,
            rows=group.rows - keep,
            first_stage=group.first_stage,
            has_drafts=group.has_drafts,
            has_results=group.has_results,
            was_cut=True,
        )
        group.rows, group.was_cut, group.split_wanted = keep, True, False
        return index

    def ask_for_split(self, model: str, owner: str) -> tuple[str, int] | None:
        """The longest group that somebody else verifies, of several the one claimed last."""
        if model != "big" or any(self._free(Stage.VERIFY)):
            return None
        candidates = [
            (-group.rows, -(group.ready_at + group.waited), job_id, index)
            for job_id, job in self.jobs.items()
            if job.stage is Stage.RUN and not job.cancelled
            if all(group.stage is not Stage.PROPOSE for group in job.groups.values())
            for index, group in job.groups.items()
            if group.stage is Stage.VERIFY and group.owner != owner
            if group.rows > 1 and not group.split_wanted
        ]
        if not candidates:
            return None
        *_, job_id, index = min(candidates)
        self.jobs[job_id].groups[index].split_wanted = True
        return job_id, index

    # --- results ----------------------------------------------------------------------------
    def advance(self, lease: Lease, to: Stage, *_: object) -> None:
        if lease.stage not in CANCELLABLE:
            raise ValueError(lease)
        group = self._held_group(lease, *CANCELLABLE)[1]
        if to is Stage.VERIFY:
            group.has_drafts = True
        else:
            group.has_results = True
        group.move(to, self.now())

    def commit_group(
        self, lease: Lease, records: Sequence[CompletionRecord], *_: object
    ) -> Stage | None:
        job, group = self._held_group(lease, Stage.RECORD)
        rows = {record.row_index for record in records}
        job.completions |= rows
        if group.rows_kept:
            group.kept |= rows
        was, waited = job.stage, job.resumes_at is not None
        group.move(Stage.DONE, self.now())
        job.settle(self.now())
        if job.stage is Stage.PUBLISH and was is not Stage.PUBLISH:
            return Stage.PUBLISH
        resumed = job.stage is Stage.INGEST and waited and job.resumes_at is None
        return Stage.INGEST if resumed else None

    def keep_part(self, lease: Lease, records: Sequence[CompletionRecord], *_: object) -> None:
        job, group = self._held_group(lease, Stage.VERIFY)
        rows = {record.row_index for record in records}
        job.completions |= rows
        group.kept |= rows
        group.rows_kept += len(rows)
        group.move(Stage.CANCELLED, self.now())
        job.settle(self.now())

    def kept_rows(self, job_id: str) -> set[int]:
        return set().union(*(group.kept for group in self.jobs[job_id].groups.values()))

    # --- what is due ------------------------------------------------------------------------
    def due(self) -> list[tuple[str, Stage, int | None]]:
        jobs = sorted(
            (job.ready_at, job_id, job.stage)
            for job_id, job in self.jobs.items()
            if job.stage in (Stage.INGEST, Stage.PUBLISH)
            if job.lease_until <= self.now() and job.resumes_at is None
        )
        groups = sorted(
            (group.ready_at, job_id, index, group.stage)
            for job_id, index, group in self._free(*OPEN)
        )
        return [(job_id, stage, None) for _, job_id, stage in jobs] + [
            (job_id, stage, index) for _, job_id, index, stage in groups
        ]

    def failed_groups(self, job_id: str) -> list[tuple[int, str]]:
        groups = sorted(self.jobs[job_id].groups.items())
        return [(index, group.stage.value) for index, group in groups if group.stage in CLOSED]
