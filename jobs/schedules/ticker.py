"""Checks a schedule: notes each due time once, and submits it or reports it as missed.

1) a due time gets its row: queued, missed or skipped. The row is the decision: the first
   process to write it decides, and the row outlives the process
2) the oldest queued time is submitted when no older run is open, with a key made of the
   schedule and the time: the store makes one job of it, however often that is tried
3) the row then says submitted, and names the job

A time of another kind than `job` is claimed instead, and its attempt started (`attempt.py`). An
attempt that was not heard of for its lease is queued again.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import takewhile

from specbatch.jobs.schedules.attempt import Attempt, utc
from specbatch.jobs.schedules.definition import CatchUp, Schedule
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.errors import (
    IdempotencyError,
    JobNotFoundError,
    SpecbatchError,
    UsageError,
)
from specbatch.schemas.schedules import RUN_LEASE_SEC, RunState, ScheduleRun
from specbatch.schemas.spec import JobSpec

MOST_HELD = 1000  # times of an outage that may still run
MOST_TOLD = 100  # missed times that get a row each


@dataclass(frozen=True, slots=True)
class Due:
    """Due times without a row yet, in order."""

    times: Sequence[float]  # the newest `MOST_HELD` of them
    earlier: int = 0  # how many came before those ...
    first: float | None = None  # ... and when the first did


def due_times(times: Iterable[float], now: float) -> Due:
    """The times of `times` up to now."""
    newest: deque[float] = deque(maxlen=MOST_HELD)
    count, first = 0, None
    for at in takewhile(lambda at: at <= now, times):
        count, first = count + 1, at if first is None else first
        newest.append(at)
    earlier = count - len(newest)
    return Due(tuple(newest), earlier, first if earlier else None)


def to_run(
    times: Sequence[float], now: float, catch_up: CatchUp, limit: int, grace_sec: float
) -> Sequence[float]:
    """The due times to run; the others count as missed.

    none     the newest, if it is still on time
    latest   the newest
    all      the newest `limit`
    """
    if catch_up == "all":
        return times[-limit:]
    newest = times[-1:]
    if catch_up == "none" and newest and now - newest[0] > grace_sec:
        return ()
    return newest


log = logging.getLogger(__name__)

_LOOKED_BACK = 20  # submitted runs that are checked for their end
_QUEUED = frozenset({RunState.QUEUED})
_RUNNING = frozenset({RunState.RUNNING})
_NOT_SUBMITTED = frozenset({RunState.QUEUED, RunState.FAILED})
_NOT_RUN = frozenset({RunState.QUEUED, RunState.MISSED, RunState.SKIPPED, RunState.FAILED})


def key_of(schedule: str, logical_at: float) -> str:
    """The idempotency key of one time of one schedule."""
    return f"schedule:{schedule}:{utc(logical_at)}"


@dataclass(slots=True)
class _LastCheck:
    """A ticker's last check of a schedule."""

    timing: str
    upto: float  # times until then have been handled
    is_logged: bool = False  # logged that another scheduler uses another timing


@dataclass(frozen=True, slots=True)
class Ticker:
    """Checks schedules. Several tickers on several machines may check the same ones at once.

    It remembers its last check of each, to notice another copy of the file with other times.
    """

    store: Store
    client: Client
    clock: Callable[[], float]
    check: Callable[[JobSpec], None] = lambda _spec: None  # raises `UsageError` for a wrong job
    start: Callable[[Attempt], object] = lambda _attempt: None  # of kinds other than `job`
    _checks: dict[str, _LastCheck] = field(default_factory=dict, compare=False)  # by schedule

    def tick(self, schedule: Schedule, since: float | None = None) -> list[ScheduleRun]:
        """Do what is due. Returns the rows that were written. Raises `StoreError`.

        A schedule that was never checked begins now, or at `since`.
        """
        now = self.clock()
        last = self._last_check(schedule, now if since is None else since, now)
        if schedule.fields.paused:
            return []
        newest = self.store.schedule_runs(schedule.name, limit=1, upto=now)
        after = max([last.upto, *(run.logical_at for run in newest)])
        due = due_times(schedule.times.after(after), now)
        decided = list(self._decide(schedule, due, now))
        last.upto = now
        return [*decided, *self._work_off(schedule)]

    def run_at(self, schedule: Schedule, logical_at: float) -> list[ScheduleRun]:
        """Submit one time whatever the policies say. Returns the written rows, its own last.

        Other due times are handled first, or they might be missed. A time that was submitted before
        keeps its row. Raises `UsageError` for a time that is not the schedule's or is in the
        future.
        """
        now = self.clock()
        if logical_at > now:
            raise UsageError(f"{self._words(schedule, logical_at)} is still to come")
        if next(schedule.times.after(logical_at - 1)) != logical_at:
            following = self._words(schedule, next(schedule.times.after(logical_at)))
            raise UsageError(
                f"{self._words(schedule, logical_at)} is not a time of schedule {schedule.name} "
                f"({schedule.timing}): the next one after it is {following}"
            )
        rows = self.tick(schedule, now - schedule.fields.grace_sec)
        others = [row for row in rows if row.logical_at != logical_at]
        asked = ScheduleRun(schedule.name, logical_at, RunState.QUEUED, reason="asked for by hand")
        if self.store.note_schedule_run(asked, replaces=_NOT_RUN):
            return [*others, self._begin(schedule, asked)]
        return [*others, self._row(asked)]

    def next_time(self, schedule: Schedule) -> float | None:
        """When the next time of the schedule comes."""
        return None if schedule.fields.paused else next(schedule.times.after(self.clock()), None)

    # --- since when -------------------------------------------------------------------------
    def _last_check(self, schedule: Schedule, since: float, now: float) -> _LastCheck:
        """The last check of a schedule with its present timing. A new timing is noted, and its
        times count from `since` on.

        So a changed or formerly paused schedule misses no times that it did not have.
        """
        begin = self._seen_since(schedule, now)
        last = self._checks.get(schedule.name)
        if last is not None and last.upto > now:
            last = None  # a clock that was ahead: the store says more
        if last is not None and last.timing == schedule.timing:
            # The file here is unchanged, so a newest row with other times is another process's.
            if begin is not None:
                last.upto = min(last.upto, begin)
            elif not last.is_logged:
                last.is_logged = True
                log.warning(
                    "schedule %s runs with other times elsewhere, here it is %s: give all "
                    "schedulers the same file",
                    schedule.name,
                    schedule.timing,
                )
            return last
        if begin is None:
            # Between two seconds, where no time of a schedule can be.
            at = math.floor(since) + 0.5
            seen = ScheduleRun(schedule.name, at, RunState.SEEN, reason=schedule.timing)
            self.store.note_schedule_run(seen)
            begin = self._seen_since(schedule, now)
        last = _LastCheck(schedule.timing, since if begin is None else begin)
        self._checks[schedule.name] = last
        return last

    def _seen_since(self, schedule: Schedule, now: float) -> float | None:
        """Rows that a fast clock wrote do not count before their time has come."""
        since, seen = None, {RunState.SEEN}
        for row in self.store.schedule_runs(schedule.name, states=seen, upto=math.floor(now) + 0.5):
            if row.reason != schedule.timing:
                break
            since = row.logical_at
        return since

    # --- deciding about due times -----------------------------------------------------------
    def _decide(self, schedule: Schedule, due: Due, now: float) -> Iterator[ScheduleRun]:
        if not due.times:
            return
        fields = schedule.fields
        chosen = to_run(due.times, now, fields.catch_up, fields.catch_up_limit, fields.grace_sec)
        older, waiting = self._open(schedule), self._queued(schedule)
        # Times that are caught up together always wait for each other.
        overlap = fields.overlap if older or waiting else "queue"

        def entry(at: float) -> ScheduleRun:
            if overlap == "skip":
                met = _met(older or waiting, bool(older))
                return ScheduleRun(schedule.name, at, RunState.SKIPPED, reason=met)
            late = timedelta(seconds=round(now - at))
            why = f"caught up, {late} late" if now - at > fields.grace_sec else None
            return ScheduleRun(schedule.name, at, RunState.QUEUED, reason=why)

        rows = [*_missed(schedule, due, frozenset(chosen), now), *map(entry, chosen)]
        ends = overlap == "cancel-old" and bool(chosen)
        # Together, so that another ticker sees all of them or none.
        noted = self.store.note_schedule_runs(rows, _passed_by(waiting, chosen[0]) if ends else ())
        yield from noted
        for run in noted:
            if run.state is RunState.MISSED:
                missed = utc(run.logical_at)
                log.warning("schedule %s missed %s: %s", schedule.name, missed, run.reason)

    # --- submitting -------------------------------------------------------------------------
    def _work_off(self, schedule: Schedule) -> Iterator[ScheduleRun]:
        """Submit waiting runs one after the other, as long as no older run is open.

        Other tickers may do the same. In this order of reads, a run that they end was already out
        of the queue, and a run that they take from the queue is then open.
        """
        while waiting := self._queued(schedule):
            at_work = self._open(schedule)
            if schedule.fields.overlap == "cancel-old":
                at_work = self._without_old(at_work, waiting)
            if at_work:
                return
            waiting = self._queued(schedule)
            if not waiting or self._open(schedule):
                return
            run = self._begin(schedule, waiting[0])
            if run.state is RunState.QUEUED or run == waiting[0]:
                return  # that failed, and may succeed next time
            yield run

    def _without_old(
        self, at_work: list[ScheduleRun], waiting: list[ScheduleRun]
    ) -> list[ScheduleRun]:
        """Cancel the older runs that a waiting run replaces. Returns the remaining ones.

        This happens here, not at the decision, so that the next check repeats it after any failure.
        A run that was queued before the older run was submitted is caught up with it, and waits.
        """
        going_on = []
        for run in at_work:
            newer = [
                one.logical_at
                for one in waiting
                if one.logical_at > run.logical_at and one.noted_at > run.noted_at
            ]
            if newer:
                self._cancel(run, f"its run of {utc(newer[0])} was due")
            else:
                going_on.append(run)
        return going_on

    def _cancel(self, run: ScheduleRun, reason: str) -> None:
        if run.job_id is not None:
            self.client.cancel(run.job_id, f"schedule {run.schedule}: {reason}")
        else:  # the attempt sees it when it next says that it lives
            self.store.hold_schedule_run(replace(run, state=RunState.SKIPPED, reason=reason))

    def _begin(self, schedule: Schedule, run: ScheduleRun) -> ScheduleRun:
        """Submit a time's job, or start what it is instead. Returns its row afterwards."""
        return self._submit(schedule, run) if schedule.is_job else self._start(schedule, run)

    def _start(self, schedule: Schedule, run: ScheduleRun) -> ScheduleRun:
        try:
            options = schedule.options_at(run.logical_at)
        except UsageError as error:
            log.error("schedule %s, %s: not run: %s", run.schedule, utc(run.logical_at), error)
            failed = replace(run, state=RunState.FAILED, reason=str(error))
            return failed if self.store.note_schedule_run(failed, {run.state}) else self._row(run)
        claimed = self.store.claim_schedule_run(run)
        if claimed is None:  # another ticker was sooner
            return replace(run, state=RunState.QUEUED)
        self.start(Attempt(claimed, schedule.fields.kind, options, schedule.fields.notify))
        return self._row(claimed)

    def _submit(self, schedule: Schedule, run: ScheduleRun) -> ScheduleRun:
        """Submit a waiting time. Returns its row afterwards."""
        words = f"schedule {schedule.name}, {utc(run.logical_at)}"
        reason = run.reason
        try:
            spec = schedule.spec_at(run.logical_at)
            self.check(spec)
            job, created = self.client.submit(spec, key_of(schedule.name, run.logical_at))
            job_id = job.job_id
        except IdempotencyError as error:  # another file's job already took this time
            job_id, created, reason = error.job_id, False, f"submitted otherwise: {error}"
            log.warning("%s: %s", words, reason)
        except UsageError as error:
            log.error("%s: not submitted: %s", words, error)
            failed = ScheduleRun(run.schedule, run.logical_at, RunState.FAILED, reason=str(error))
            return failed if self.store.note_schedule_run(failed, {run.state}) else self._row(run)
        except SpecbatchError as error:
            log.warning("%s: not submitted yet: %s", words, error)
            return run
        done = ScheduleRun(run.schedule, run.logical_at, RunState.SUBMITTED, job_id, reason)
        # Also from FAILED, if another ticker failed meanwhile: the job exists all the same. And
        # from RUNNING, if the schedule was of another kind when an attempt died.
        if self.store.note_schedule_run(done, replaces=_NOT_SUBMITTED | {run.state}):
            log.info("%s: job %s submitted", words, job_id)
            return done
        now = self._row(run)
        if created and now.state is RunState.SKIPPED:  # by another ticker meanwhile
            self.client.cancel(job_id, f"{words}: {now.reason}")
        return now

    # --- what the store has -----------------------------------------------------------------
    def _queued(self, schedule: Schedule) -> list[ScheduleRun]:
        """Queued runs, the oldest first, without those of a fast clock that are in the future.

        Attempts that died are queued again.
        """
        now = self.clock()
        rows = self.store.schedule_runs(schedule.name, MOST_HELD, _QUEUED | _RUNNING, upto=now)
        return [run for run in reversed(rows) if not _lives(run, now)]

    def _open(self, schedule: Schedule) -> list[ScheduleRun]:
        """Attempts that live, and runs with open jobs that are not being cancelled.

        It reads the last submitted runs in any order of times, because users may submit old times.
        """
        found = []
        begun = {RunState.SUBMITTED} | _RUNNING
        for run in self.store.schedule_runs(schedule.name, _LOOKED_BACK, begun, by_noted=True):
            if run.state is RunState.RUNNING:
                found += [run] * _lives(run, self.clock())
                continue
            try:
                job = self.store.get_job(run.job_id or "")
            except JobNotFoundError:
                continue
            if not job.state.is_final and not job.cancel_requested:
                found.append(run)
        return found

    def _row(self, run: ScheduleRun) -> ScheduleRun:
        """The stored row of the same time."""
        rows = self.store.schedule_runs(run.schedule, 1, logical_at=run.logical_at)
        return rows[0] if rows else run

    def _words(self, schedule: Schedule, at: float) -> str:
        return schedule.times.local(at).isoformat()


def _lives(run: ScheduleRun, now: float) -> bool:
    """Whether an attempt at it was heard of within its lease."""
    return run.state is RunState.RUNNING and now - run.noted_at <= RUN_LEASE_SEC


def _met(others: list[ScheduleRun], are_at_work: bool) -> str:
    """The run that a time to run meets, in words."""
    run = others[0]
    what = "the run" if run.job_id is None else f"job {run.job_id}"
    return f"{what} of {utc(run.logical_at)} was still {'running' if are_at_work else 'waiting'}"


def _missed(
    schedule: Schedule, due: Due, chosen: frozenset[float], now: float
) -> list[ScheduleRun]:
    """The rows of missed times. The older times of a long outage share one row."""
    catch_up: str = schedule.fields.catch_up
    if catch_up == "all":
        catch_up = f"all, up to {schedule.fields.catch_up_limit}"
    why = f"no scheduler checked it until {utc(now)}, and catch_up is {catch_up}"
    times = [at for at in due.times if at not in chosen]
    missed = [(at, why) for at in times[-MOST_TOLD:]]
    if untold := len(times) - len(missed) + due.earlier:
        first = times[0] if due.first is None else due.first
        missed.insert(0, (first, f"{why}; {untold - 1:,} more missed times after it have no rows"))
    return [ScheduleRun(schedule.name, at, RunState.MISSED, reason=reason) for at, reason in missed]


def _passed_by(waiting: list[ScheduleRun], newer: float) -> list[ScheduleRun]:
    """The rows of waiting runs that a newer time replaces."""
    reason = f"the run of {utc(newer)} took its place"
    return [
        ScheduleRun(run.schedule, run.logical_at, RunState.SKIPPED, reason=reason)
        for run in waiting
    ]
