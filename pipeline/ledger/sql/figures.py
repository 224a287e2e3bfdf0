"""What people see: counts of a job, figures of its rows, and what waits and who works.

A job's counts never scan its completions. Figures of the whole store use indexes of open work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    and_,
    bindparam,
    case,
    cast,
    delete,
    func,
    or_,
    select,
)

from specbatch.pipeline.ledger.contract import AUDITED_SEC, FOUND_SEC, MISSED_SEC, SUCCESS_SEC
from specbatch.pipeline.ledger.sql import audit_log, budgets, jobs, switching
from specbatch.pipeline.ledger.sql.pinning import PINNED_COLUMNS
from specbatch.pipeline.ledger.sql.reading import BY_ROW
from specbatch.pipeline.ledger.sql.transactions import Now, Transactions, in_parts, upsert
from specbatch.pipeline.policy.costs import forecast
from specbatch.schemas import completion_rows, mapper, presence, time_mapper
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.audit_tables import AuditLog
from specbatch.schemas.backlog import Backlog, PinnedJob, StageBacklog
from specbatch.schemas.figures import SLOW_FALLS, SPEND, ScheduleRuns, StoreFigures
from specbatch.schemas.job_figures import GroupFigures, RowFigures
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.placement import Site
from specbatch.schemas.presence import ProcessNow
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import (
    CLAIMABLE,
    JobState,
    Stage,
)
from specbatch.schemas.schedules import HAD, LOST, PAUSED, RunState
from specbatch.schemas.tables import (
    Completion,
    Group,
    Job,
    ScheduleRun,
    WorkerProcess,
    WorkerSession,
    group_is_open,
    job_is_due,
    job_is_live,
)

# --- a job's counts -------------------------------------------------------------------------


_FINISHED = Group.stage.in_([Stage.DONE.value, Stage.FAILED.value])
_FAILED = Group.stage == Stage.FAILED.value
_CANCELLED = Group.stage == Stage.CANCELLED.value
# Rows that were kept when the job was stopped stay when their group fails after a retry.
_ROWS_FAILED = Group.rows_failed + case((_FAILED, Group.rows - Group.rows_kept), else_=0)


def _total(value: Any) -> Any:
    return func.coalesce(func.sum(value), 0)


_COUNTS = (
    *("groups_done", "completions", "completion_tokens"),
    *("proposed", "accepted", "verifier_passes"),
)
_AMOUNTS = ("queue_sec", "compute_sec", "cost_usd")
_TOTALS = {
    "rows_finished": _total(case((_FINISHED, Group.rows), (_CANCELLED, Group.rows_kept), else_=0)),
    "rows_failed": _total(_ROWS_FAILED),
    "groups_done": _total(case((_FINISHED, 1), else_=0)),
    **{name: _total(getattr(Group, name)) for name in _COUNTS[1:]},
    **{name: cast(_total(getattr(Group, name)), Double) for name in _AMOUNTS},
}


_OF_JOB = select(*(value.label(name) for name, value in _TOTALS.items())).where(
    Group.job_id == bindparam("job_id")
)


def progress(conn: Connection, job_id: str) -> JobProgress:
    """Two statements, whatever the size of the job."""
    job = jobs.find(conn, job_id)
    totals = conn.execute(_OF_JOB, {"job_id": job.job_id}).one()
    return _progress(job, totals)


def progress_of(conn: Connection, job_ids: Collection[str]) -> dict[str, JobProgress]:
    """The same of several jobs, by whole id."""
    query = select(Job.job_id, *_totals()).outerjoin(Group, Group.job_id == Job.job_id)
    query = query.group_by(Job.job_id)
    found: dict[str, JobProgress] = {}
    for some in in_parts(job_ids):
        of_jobs = {row.job_id: row for row in conn.execute(query.where(Job.job_id.in_(some)))}
        rows = conn.execute(select(*Job.__table__.c).where(Job.job_id.in_(list(of_jobs))))
        found |= {job.job_id: _progress(job, of_jobs[job.job_id]) for job in rows}
    return found


def _totals() -> list[Any]:
    return [value.label(name) for name, value in _TOTALS.items()]


def _progress(job: Any, totals: Any) -> JobProgress:
    return JobProgress(
        job_id=job.job_id,
        state=JobState(job.state),
        rows_total=job.rows_total if job.ingest_done else job.next_row,
        rows_done=int(totals.rows_finished) + job.rows_rejected,
        rows_failed=int(totals.rows_failed) + job.rows_rejected,
        groups_total=job.groups_total + job.groups_cut,
        prompt_tokens=job.prompt_tokens,
        ingest_done=job.ingest_done,
        **{name: int(getattr(totals, name)) for name in _COUNTS},
        **{name: getattr(totals, name) for name in _AMOUNTS},
    )


# --- a job's groups and rows, a page at a time ----------------------------------------------


_PAGE = 2000
_GROUP = (
    *("group_index", "stage", "rows", "ready_at", "queue_sec", "compute_sec", "completions"),
    *("completion_tokens", "proposed", "accepted", "verifier_passes", "cost_usd"),
)
_ROW = (
    *("row_index", "sample_index", "group_index", "tag", "finish_reason", "prompt_tokens"),
    *("proposed", "accepted", "verifier_passes", "cost_usd", "prefill_ticks", "verify_ticks"),
    *("draft_ticks", "rejected_ticks", "padding_ticks", "overhead_ticks"),
    *("origins", "steps", "sources", "makers", "drafted"),
)


def of_groups(database: Transactions, job_id: str) -> Iterator[GroupFigures]:
    query = select(*(getattr(Group, name) for name in _GROUP)).where(Group.job_id == job_id)
    for rows in database.pages(query, (Group.group_index,), _PAGE):
        yield from map(_group, rows)


def of_rows(database: Transactions, job_id: str, batch: int = 1000) -> Iterator[RowFigures]:
    query = select(*(getattr(Completion, name) for name in _ROW)).where(Completion.job_id == job_id)
    for rows in database.pages(query, BY_ROW, batch):
        yield from map(completion_rows.row_figures, rows)


def _group(row: Any) -> GroupFigures:
    stage = Stage(row.stage)
    done_at = row.ready_at if stage is Stage.DONE else None
    return mapper.named(GroupFigures, row, index=row.group_index, stage=stage, done_at=done_at)


# --- the whole store ------------------------------------------------------------------------


def figures(conn: Connection, now: Now) -> StoreFigures:
    open_work = backlog(conn, now)
    found = _found(conn, open_work.at)
    return StoreFigures(
        backlog=open_work,
        audited=audit_log.correctness(conn, open_work.at - AUDITED_SEC),
        schedules=_schedules(conn, open_work.at),
        at_risk=_at_risk(conn, open_work.at),
        slow_falls={(name, by): of for name, by, of in found.get(SLOW_FALLS, ())},
        spend=found.get(SPEND, {}),
        draft_switches=Counter(switch.scope.kind for switch in switching.switches(conn)),
    )


def _found(conn: Connection, at: float) -> dict[str, Any]:
    """By kind what the newest run found, if it is not long ago."""
    query = (
        select(ScheduleRun.found)
        .where(ScheduleRun.state == RunState.DONE.value, ScheduleRun.noted_at >= at - FOUND_SEC)
        .order_by(ScheduleRun.noted_at)
    )
    found: dict[str, Any] = {}
    for of_run in conn.execute(query).scalars():
        found |= of_run or {}
    return found


def _at_risk(conn: Connection, at: float) -> dict[str | None, int]:
    """Live jobs with a deadline by name; None: of those of which no texts are kept."""
    columns = ("job_id", "name", "tenant", "privacy", "created_at", "started_at", "deadline_at")
    found: dict[str | None, int] = {}
    live = conn.execute(
        select(
            *(getattr(Job, name) for name in columns),
            (Job.rows_total - Job.rows_rejected).label("rows"),
            _total(case((_FINISHED, Group.rows), else_=0)).label("done"),
        )
        .outerjoin(Group, Group.job_id == Job.job_id)
        .where(_is_not_over(), ~Job.cancel_requested, Job.deadline_at.is_not(None))
        .group_by(Job.job_id)
    ).all()
    for job in live:
        name = None if job.privacy == PrivacyMode.HASH_ONLY.value else job.name
        begun = job.created_at if job.started_at is None else job.started_at
        usual = None if job.done else _usual_sec(conn, job)
        ends_at = forecast.ends_at(at, begun, int(job.done), int(job.rows), usual)
        is_at_risk = ends_at is not None and ends_at > job.deadline_at
        is_at_risk = is_at_risk and not _was_retried(conn, job.job_id)
        found[name] = found.get(name, 0) + is_at_risk
    return found


def _was_retried(conn: Connection, job_id: str) -> bool:
    """Whether a job was sent back to work: how long it has taken tells nothing then."""
    return bool(conn.execute(select(_retries(job_id).exists())).scalar())


def _retries(job_id: Any) -> Any:
    """Entries of the log about a job that was sent back to work."""
    retried = AuditLog.kind == EntryKind.RETRIED.value
    return select(AuditLog.number).where(AuditLog.job_id == job_id, retried)


def _usual_sec(conn: Connection, job: Any) -> float | None:
    """How long the newest finished job of the same name took that was not retried."""
    took = Job.finished_at - func.coalesce(Job.started_at, Job.created_at)
    same = (Job.tenant == job.tenant, Job.name == job.name, Job.state == JobState.DONE.value)
    at_once = ~_retries(Job.job_id).exists()
    newest = select(took).where(*same, at_once).order_by(Job.created_at.desc()).limit(1)
    return conn.execute(newest).scalar()


def _schedules(conn: Connection, at: float) -> dict[str, ScheduleRuns]:
    """One row a run: a few thousand in all. Lost ones are found by their time."""
    submitted = (
        select(ScheduleRun.schedule, func.max(ScheduleRun.noted_at))
        .where(ScheduleRun.state.in_([state.value for state in HAD]))
        .where(ScheduleRun.noted_at >= at - SUCCESS_SEC)
        .group_by(ScheduleRun.schedule)
    )
    lost = (
        select(ScheduleRun.schedule, func.count())
        .where(ScheduleRun.logical_at >= at - MISSED_SEC)
        .where(ScheduleRun.state.in_([state.value for state in LOST]))
        .where(ScheduleRun.attempts == 0)
        .group_by(ScheduleRun.schedule)
    )
    here = (
        select(
            ScheduleRun.schedule, ScheduleRun.state, ScheduleRun.noted_at, ScheduleRun.started_at
        )
        .where(ScheduleRun.noted_at >= at - MISSED_SEC, ScheduleRun.attempts > 0)
        .where(ScheduleRun.state.in_([RunState.DONE.value, RunState.FAILED.value]))
        .order_by(ScheduleRun.noted_at)
    )
    ended = (
        select(
            *(ScheduleRun.schedule, Job.job_id, Job.state, Job.created_at, Job.finished_at),
            (Job.finished_at >= Job.deadline_at).label("is_late"),
        )
        .join(Job, Job.job_id == ScheduleRun.job_id)
        .where(Job.finished_at >= at - MISSED_SEC)
        .order_by(Job.finished_at, Job.job_id)
    )
    newest = (
        select(ScheduleRun.schedule, func.max(ScheduleRun.logical_at).label("logical_at"))
        .where(ScheduleRun.state == RunState.SEEN.value)
        .group_by(ScheduleRun.schedule)
        .subquery()
    )
    same = and_(
        ScheduleRun.schedule == newest.c.schedule, ScheduleRun.logical_at == newest.c.logical_at
    )
    seen = select(ScheduleRun.schedule, ScheduleRun.reason).join(newest, same)
    known = {row.schedule: row.reason for row in conn.execute(seen)}
    paused = {name for name, timing in known.items() if timing == PAUSED}
    last = {name: float(when) for name, when in conn.execute(submitted) if name not in paused}
    missed = {name: int(count) for name, count in conn.execute(lost)}
    took: dict[str, float] = {}
    bad: Counter[tuple[str, str]] = Counter()
    for run in conn.execute(ended):
        went_through = run.state in (JobState.DONE.value, JobState.PARTIAL.value)
        if went_through and not _was_retried(conn, run.job_id):
            took[run.schedule] = run.finished_at - run.created_at
        is_late = run.state == JobState.CANCELLED.value and run.is_late
        bad[run.schedule, "late" if is_late else run.state] += 1
    for attempt in conn.execute(here):
        if attempt.state == RunState.DONE.value:
            took[attempt.schedule] = attempt.noted_at - attempt.started_at
        else:
            bad[attempt.schedule, JobState.FAILED.value] += 1
    names = {*last, *missed, *took, *(name for name, _ in bad), *(known.keys() - paused)}
    return {
        name: ScheduleRuns(
            last.get(name),
            missed.get(name, 0),
            bad[name, JobState.FAILED.value],
            bad[name, JobState.PARTIAL.value],
            bad[name, "late"],
            took.get(name),
        )
        for name in sorted(names)
    }


# --- backlog --------------------------------------------------------------------------------


_NOT_OVER = (JobState.QUEUED, JobState.RUNNING)


def backlog(conn: Connection, now: Now) -> Backlog:
    at = float(conn.execute(select(now)).scalar_one())
    over_budget = tuple(budgets.shortfalls(conn, now))
    claimable = ~budgets.is_held_back(over_budget)
    units = [
        *conn.execute(_units(Group, now, group_is_open(), claimable)),
        *conn.execute(_units(Job, now, job_is_due(), Job.ingest_resumes_at.is_(None))),
    ]
    stages = {Stage(row.stage): _stage(row, at) for row in units}
    states = {
        JobState(row.state): row
        for row in conn.execute(
            select(
                Job.state,
                func.count().label("jobs"),
                func.coalesce(func.sum(Job.rows_rejected), 0).label("rejected"),
            )
            .where(_is_not_over())
            .group_by(Job.state)
        )
    }
    in_groups = conn.execute(
        select(_total(_ROWS_FAILED)).join(Job, Job.job_id == Group.job_id).where(_is_not_over())
    ).scalar_one()
    return Backlog(
        at=at,
        stages=tuple(stages.get(stage, StageBacklog(stage)) for stage in CLAIMABLE),
        jobs={state: states[state].jobs if state in states else 0 for state in _NOT_OVER},
        rows_failed=int(in_groups) + sum(int(row.rejected) for row in states.values()),
        workers=tuple(time_mapper.worker_now(row, at) for row in conn.execute(workers(now))),
        pinned=tuple(_pinned(conn)),
        processes=tuple(processes(conn, at)),
        over_budget=over_budget,
    )


def _pinned(conn: Connection) -> list[PinnedJob]:
    """Live jobs by id, each with the stages at which it has something to be done."""
    stages: dict[str, set[Stage]] = {}
    at_work = select(Group.job_id, Group.stage).where(group_is_open()).distinct()
    for row in conn.execute(at_work):
        stages.setdefault(row.job_id, set()).add(Stage(row.stage))
    wanted = (Job.job_id, Job.stage, Job.verifier, Job.proposer, Job.spec, Job.model_parts)
    jobs = conn.execute(
        select(*wanted, Job.ingest_resumes_at, *PINNED_COLUMNS)
        .where(_is_not_over(), ~Job.cancel_requested)
        .order_by(Job.job_id)
    )
    found = []
    for job in jobs:
        of_groups = stages.get(job.job_id, set())
        if Stage(job.stage) in (Stage.INGEST, Stage.PUBLISH) and job.ingest_resumes_at is None:
            of_groups.add(Stage(job.stage))
        found.append(PinnedJob.of(job, of_groups))
    return found


def _is_not_over() -> ColumnElement[bool]:
    """By the indexes: past jobs may be many."""
    return or_(job_is_due(), job_is_live())


def _units(table: type[Group] | type[Job], now: Now, *which: ColumnElement[bool]) -> Any:
    ready = table.lease_until <= now
    since = case((table.lease_until > table.ready_at, table.lease_until), else_=table.ready_at)
    return (
        select(
            table.stage,
            func.sum(case((ready, 1), else_=0)).label("ready"),
            func.sum(case((ready, 0), else_=1)).label("leased"),
            func.sum(case((ready & (table.lease_until > 0), 1), else_=0)).label("expired"),
            func.min(case((ready, since))).label("oldest"),
        )
        .where(*which)
        .group_by(table.stage)
    )


def _stage(row: Any, at: float) -> StageBacklog:
    waited = None if row.oldest is None else max(0.0, at - row.oldest)
    return StageBacklog(Stage(row.stage), int(row.ready), int(row.leased), int(row.expired), waited)


def workers(now: Now) -> Any:
    held = (
        select(Group.lease_owner, func.count().label("leases"))
        .where(group_is_open(), Group.lease_until > now)
        .group_by(Group.lease_owner)
        .subquery()
    )
    return (
        select(*WorkerSession.__table__.c, func.coalesce(held.c.leases, 0).label("leases"))
        .outerjoin(held, held.c.lease_owner == WorkerSession.owner)
        .where(WorkerSession.ended_at.is_(None))
        .order_by(WorkerSession.owner, WorkerSession.session_id)
    )


# --- worker processes -----------------------------------------------------------------------


def processes(conn: Connection, at: float) -> Sequence[ProcessNow]:
    """All worker processes, by owner. `at` is the time now."""
    order = (WorkerProcess.owner, WorkerProcess.process_id)
    rows = conn.execute(select(*WorkerProcess.__table__.c).order_by(*order))
    return [_process(row, at) for row in rows]


def _process(row: Any, at: float) -> ProcessNow:
    process = presence.WorkerProcess(
        *(row.process_id, row.owner, tuple(row.kinds.split(",")), row.verifier, row.proposer),
        None if row.region is None else Site(row.region, row.is_spot),
    )
    return ProcessNow(process, at - row.started_at, at - row.heard_at, row.trouble)


def report_process(
    conn: Connection, now: Now, process: presence.WorkerProcess, trouble: str | None
) -> None:
    report = {"heard_at": now, "trouble": trouble}
    conn.execute(
        upsert(conn.dialect.name, WorkerProcess)
        .values(
            process_id=process.process_id,
            owner=process.owner,
            kinds=",".join(process.kinds),
            verifier=process.verifier,
            proposer=process.proposer,
            region=process.site and process.site.region,
            is_spot=process.site is not None and process.site.is_spot,
            started_at=now,
            **report,
        )
        .on_conflict_do_update(index_elements=[WorkerProcess.process_id], set_=report)
    )


def forget_process(conn: Connection, _now: Now, process_id: str) -> None:
    conn.execute(delete(WorkerProcess).where(WorkerProcess.process_id == process_id))


def forget_silent_processes(conn: Connection, now: Now, patience_sec: float) -> int:
    silent = WorkerProcess.heard_at <= now - patience_sec
    return conn.execute(delete(WorkerProcess).where(silent)).rowcount
