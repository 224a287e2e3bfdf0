"""Claims, heartbeats and releases. A claim is one UPDATE, so exactly one of many claimers wins."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Executable,
    bindparam,
    case,
    func,
    select,
    tuple_,
    update,
)

from specbatch.pipeline.audit import entries
from specbatch.pipeline.ledger import rules, split_rules
from specbatch.pipeline.ledger.sql import (
    audit_log,
    budgets,
    jobs,
    pinning,
    residency,
    shares,
    splitting,
)
from specbatch.pipeline.ledger.sql.jobs import FREE
from specbatch.pipeline.ledger.sql.splitting import is_held
from specbatch.pipeline.ledger.sql.transactions import Now
from specbatch.schemas import mapper
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.masking import masked
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.placement import Site
from specbatch.schemas.records import Beat, GroupWork, JobState, JobWork, Lease, Released, Stage
from specbatch.schemas.tables import JOB_WORK, Group, Job, group_is_open

# --- claims ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claimer:
    """Who claims what. Statements are cached by it."""

    stage: Stage
    owner: str
    lease_sec: float
    max_attempts: int
    serves: Serves | None = None  # what it verifies with; None: groups are not told apart by that
    site: Site | None = None  # where it is; None: nobody asks

    def values(self, table: type[Job] | type[Group], now: Now) -> dict[str, Any]:
        """What a claim writes to the unit's row."""
        return {
            "generation": table.generation + 1,
            "attempts": table.attempts + 1,
            "lease_owner": self.owner,
            "lease_until": now + self.lease_sec,
        }


def claim_job(conn: Connection, now: Now, claimer: Claimer, job_id: str) -> JobWork | None:
    stage = claimer.stage
    if stage.value not in JOB_WORK:
        return None
    values: dict[str, Any] = {}
    allowed = [Job.attempts < claimer.max_attempts]
    if stage is Stage.INGEST:
        allowed += [~Job.cancel_requested, Job.ingest_resumes_at.is_(None)]
        started_at = func.coalesce(Job.started_at, now)
        values = {"state": JobState.RUNNING.value, "started_at": started_at}
    row = conn.execute(
        update(Job)
        .where(Job.job_id == job_id, *is_free(Job, stage, now), *allowed)
        .where(*residency.placed(claimer.site))
        .values(**claimer.values(Job, now), **values)
        .returning(*Job.__table__.c)
    ).first()
    if row is None:
        _close_job(conn, now, job_id, stage, claimer.max_attempts)
        return None
    return mapper.job_work(row)


def claim_group(
    conn: Connection, now: Now, claimer: Claimer, job_id: str, index: int
) -> GroupWork | None:
    """Raises `UnpinnedError` and `MovedError`."""
    stage, max_attempts = claimer.stage, claimer.max_attempts
    if stage not in rules.OPEN:
        return None
    parameters: dict[str, Any] = {"of_job": job_id, "of_index": index}
    claim = _claim(now, claimer, is_limited=False)
    if stage is Stage.VERIFY and (tenant := _budgeted_tenant(conn, job_id)) is not None:
        room = budgets.room_to_claim(conn, now, tenant)
        if room is not None:
            claim, parameters["of_room"] = _claim(now, claimer, is_limited=True), room
    work = taken(conn, claim, max_attempts, parameters)
    if work is None and close_group(conn, now, job_id, index, stage, max_attempts):
        # The first half has an attempt left. Its second half is due: the sweeper enqueues it.
        return claim_group(conn, now, claimer, job_id, index)
    if work is None or claimer.serves is None:
        return work
    pinned = pinning.pinned(conn, job_id)
    pinning.check(claimer.serves, job_id, pinned)
    return replace(work, **pinned._asdict())


_TENANT = select(Job.tenant).where(
    Job.job_id == bindparam("of_job"), budgets.is_budgeted(Job.tenant)
)


def _budgeted_tenant(conn: Connection, job_id: str) -> str | None:
    """The job's tenant if that has a budget."""
    return conn.scalar(_TENANT, {"of_job": job_id})


@lru_cache(maxsize=16)
def _claim(now: Now, claimer: Claimer, is_limited: bool) -> Executable:
    """The claim of group `of_index` of job `of_job`, limited to a bound of `of_room` tokens.
    Cached: building it takes longer than sending it (where the time is the server's, it is always
    the same expression)."""
    job: BindParameter[str] = bindparam("of_job")
    index: BindParameter[int] = bindparam("of_index")
    stage = claimer.stage
    allowed = [*may_claim(now, claimer), *pinning.job_is_served(job, claimer.serves)]
    allowed += residency.job_is_placed(job, claimer.site)
    if stage in rules.CANCELLABLE:
        cancelled = select(Job.cancel_requested).where(Job.job_id == job).scalar_subquery()
        allowed.append(~cancelled)
    if is_limited:
        allowed.append(budgets.fits(bindparam("of_room")))
    this = (Group.job_id == job, Group.group_index == index)
    return taking(now, claimer, *this, *allowed)


def may_claim(now: Now, claimer: Claimer) -> list[ColumnElement[bool]]:
    """The conditions of groups at the stage that the claimer may have now."""
    stage, most = claimer.stage, claimer.max_attempts
    free = [*is_free(Group, stage, now), Group.attempts < most]
    if stage in split_rules.SPLIT_AT:
        free.append(splitting.one_suspect_at_a_time(now, stage, claimer.owner, most))
    return free


def taking(
    now: Now,
    claimer: Claimer,
    *which: ColumnElement[bool],
    charged_sec: ColumnElement[float] | float = 0.0,
) -> Executable:
    """The statement that claims the one group that meets all conditions, for `taken`.

    `charged_sec`: what its tenant is charged with now; the attempt's end charges the rest.
    """
    reserves = {"reserved_tokens": budgets.bound()} if claimer.stage is Stage.VERIFY else {}
    return (
        update(Group)
        .where(*which)
        .values(
            waited_sec=now
            - case((Group.lease_until > Group.ready_at, Group.lease_until), else_=Group.ready_at),
            cut_wanted=False,
            in_flight_usd=0.0,
            charged_sec=charged_sec,
            **reserves,
            **claimer.values(Group, now),
        )
        .returning(*Group.__table__.c)
    )


def taken(
    conn: Connection, claim: Executable, max_attempts: int, parameters: Mapping[str, Any]
) -> GroupWork | None:
    """Claim a group; None when there is none to claim."""
    row = conn.execute(claim, parameters).first()
    if row is None:
        return None
    # Decided here and not by RETURNING, where SQLite 3.40 takes `IS NOT NULL` for true.
    failed_part = row.row_stop is not None and row.last_error is not None
    suspect = split_rules.is_suspect(row.attempts - 1, row.rows, failed_part, max_attempts)
    return replace(mapper.group_work(row), suspect=suspect)


def is_free(table: type[Job] | type[Group], stage: Stage, now: Now) -> list[ColumnElement[bool]]:
    return [table.stage == stage.value, table.lease_until <= now]


def _is_group(job_id: str, index: int) -> ColumnElement[bool]:
    return (Group.job_id == job_id) & (Group.group_index == index)


def _close_job(conn: Connection, now: Now, job_id: str, stage: Stage, max_attempts: int) -> None:
    """End a free job, or take it out of ingest, when nobody may claim it any more."""
    free = (Job.job_id == job_id, *is_free(Job, stage, now))
    if conn.scalar(select(Job.job_id).where(*free)) is None:
        return  # held, or at another stage: the usual end of a race
    job = jobs.lock(conn, job_id)
    row = conn.execute(select(*Job.__table__.c).where(*free)).first()
    if row is None:
        return
    if row.cancel_requested and stage is Stage.INGEST:
        jobs.leave_ingest(conn, now, job_id)
    elif row.attempts >= max_attempts:
        error = rules.last_error_at(Stage.FAILED, row.attempts, row.last_error)
        jobs.end_unpublished(conn, now, job, error)


def close_group(
    conn: Connection, now: Now, job_id: str, index: int, stage: Stage, max_attempts: int
) -> bool:
    """Close a free group whose attempts are used up or whose job is cancelled.

    True: it was split in halves instead, and stays at its stage.
    """
    free = (_is_group(job_id, index), *is_free(Group, stage, now))
    if conn.scalar(select(Group.group_index).where(*free)) is None:
        return False
    job = jobs.lock(conn, job_id)
    row = conn.execute(select(*Group.__table__.c).where(*free).with_for_update()).first()
    if row is None:
        return False
    to = rules.stage_without_lease(stage, row.attempts, max_attempts, job.cancel_requested)
    if to is stage:
        return False
    error = rules.last_error_at(to, row.attempts, row.last_error)
    if _ends_in_halves(conn, job, row, to):
        splitting.in_halves(conn, now, job, row, max_attempts, error or "")
        return True
    conn.execute(
        update(Group).where(_is_group(job_id, index)).values(**sent_on(to, now), last_error=error)
    )
    jobs.move_if_done(conn, now, job_id, **_log_if_lost(conn, now, job, row, to, error))
    return False


def _log_if_lost(
    conn: Connection,
    now: Now,
    job: Any,
    row: Any,
    to: Stage,
    error: str | None,
    actor: str | None = None,
) -> dict[str, Any]:
    """Log a group that failed for good. Returns what the job's row is updated with."""
    if to is not Stage.FAILED:
        return {}
    said = entries.lost(row.group_index, row.rows, error)
    return audit_log.link(conn, now, job, EntryKind.LOST, said, actor)


def _ends_in_halves(conn: Connection, job: Any, row: Any, to: Stage, whole: bool = False) -> bool:
    stage, is_whole = Stage(row.stage), whole or row.rows_kept > 0  # their half is not known here
    if not split_rules.ends_in_halves(
        stage, to, row.rows, cancelled=job.cancel_requested, whole=is_whole
    ):
        return False
    most = split_rules.MOST_FAILED_HALVES
    # The count is never above `groups_cut`, which also has what idle workers took over.
    return job.groups_cut < most or splitting.failed_halves(conn, job.job_id) < most


def sent_on(to: Stage, now: Now) -> dict[str, Any]:
    """Values of a free group that moves to another stage: ready now, with all attempts again.

    Its times do not change: nobody claimed it, so nobody waited for its claim.
    """
    return {"stage": to.value, "ready_at": now, "attempts": 0, **FREE}


# --- owners ---------------------------------------------------------------------------------


def _held_of(job_ids: Collection[str], now: Now) -> list[tuple[type[Job] | type[Group], list[Any]]]:
    """The conditions of leased rows: of the jobs, and of their groups."""
    groups = [Group.job_id.in_(job_ids), group_is_open(), Group.lease_until > now]
    return [(Job, [Job.job_id.in_(job_ids), Job.lease_until > now]), (Group, groups)]


def holders(conn: Connection, now: Now, job_id: str) -> list[str]:
    return holders_of(conn, now, [job_id]).get(job_id, [])


def holders_of(conn: Connection, now: Now, job_ids: Collection[str]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for table, held in _held_of(job_ids, now):
        for row in conn.execute(select(table.job_id, table.lease_owner).where(*held).distinct()):
            found.setdefault(row.job_id, set()).add(row.lease_owner)
    return {job_id: sorted(owners) for job_id, owners in found.items()}


def expire(conn: Connection, now: Now, job_id: str, owner: str) -> int:
    """The job's row goes first, as in every lock."""
    return sum(
        conn.execute(
            update(table).where(*held, table.lease_owner == owner).values(lease_until=now)
        ).rowcount
        for table, held in _held_of([job_id], now)
    )


# --- releases -------------------------------------------------------------------------------


def release(
    conn: Connection,
    now: Now,
    lease: Lease,
    error: str,
    forgiven: bool,
    whole: bool,
    max_attempts: int,
) -> Released:
    """Ready again, closed, or split by the rules; nothing when the lease is lost."""
    job, error = jobs.lock(conn, lease.job_id), masked(error)
    if job is None:
        return Released(False)
    if lease.group_index is not None:
        return _release_group(conn, now, job, lease, error, forgiven, whole, max_attempts)
    return _release_job(conn, now, job, lease, error, forgiven, max_attempts)


def _release_job(
    conn: Connection,
    now: Now,
    job: Any,
    lease: Lease,
    error: str,
    forgiven: bool,
    max_attempts: int,
) -> Released:
    held = (lease.token, lease.owner, lease.stage.value)
    if (job.generation, job.lease_owner, job.stage) != held:
        return Released(False)
    if job.cancel_requested and lease.stage is Stage.INGEST:
        jobs.leave_ingest(conn, now, lease.job_id)
    elif job.attempts - forgiven >= max_attempts:
        jobs.end_unpublished(conn, now, job, error, lease.owner)
    else:
        again = {"attempts": job.attempts - forgiven, "last_error": error}
        jobs.move(conn, now, lease.job_id, lease.stage, **again)
    return Released(True)


def _release_group(
    conn: Connection,
    now: Now,
    job: Any,
    lease: Lease,
    error: str,
    forgiven: bool,
    whole: bool,
    max_attempts: int,
) -> Released:
    held = select(*Group.__table__.c).where(*is_held(lease)).with_for_update()
    row = conn.execute(held).first()
    if row is None:
        return Released(False)
    if lease.stage in rules.CANCELLABLE:
        shares.settle_given_back(conn, lease)
    spent = row.attempts - forgiven
    to = rules.stage_without_lease(lease.stage, spent, max_attempts, job.cancel_requested)
    if _ends_in_halves(conn, job, row, to, whole):
        return Released(True, splitting.in_halves(conn, now, job, row, max_attempts, error))
    attempts = spent if to is lease.stage else 0
    conn.execute(
        update(Group)
        .where(*is_held(lease))
        .values(stage=to.value, ready_at=now, attempts=attempts, last_error=error, **FREE)
    )
    head = _log_if_lost(conn, now, job, row, to, error, lease.owner)
    jobs.move_if_done(conn, now, lease.job_id, **head)
    return Released(True)


# --- heartbeats: all leases of a process in a few statements --------------------------------


_LEASES_PER_STATEMENT = 500


def heartbeat(conn: Connection, now: Now, leases: Sequence[Lease], lease_sec: float) -> Beat:
    lost, split_wanted = set(leases), set[Lease]()
    # All jobs before all groups, as in `jobs`: a commit holds its job and wants a group.
    for part in _parts([x for x in leases if x.group_index is None]):
        lost -= _extend(conn, now, Job, part, lease_sec).keys()
    for part in _parts([x for x in leases if x.group_index is not None]):
        held = _extend(conn, now, Group, part, lease_sec)
        lost -= held.keys()
        split_wanted |= {lease for lease, row in held.items() if row.cut_wanted}
    job_ids = {lease.job_id for lease in leases}
    cancelled = conn.scalars(
        select(Job.job_id).where(Job.job_id.in_(job_ids), Job.cancel_requested)
    )
    return Beat(lost, set(cancelled), split_wanted)


def _parts(leases: Sequence[Lease]) -> Iterator[Sequence[Lease]]:
    """Leases in the order of their keys, as many as one statement takes."""
    ordered = sorted(leases, key=lambda lease: (lease.job_id, lease.group_index))
    for start in range(0, len(ordered), _LEASES_PER_STATEMENT):
        yield ordered[start : start + _LEASES_PER_STATEMENT]


def _extend(
    conn: Connection,
    now: Now,
    table: type[Job] | type[Group],
    leases: Sequence[Lease],
    lease_sec: float,
) -> dict[Lease, Any]:
    """Extend those leases of jobs or of groups that are current; return them with their rows."""
    # `attempt` is not in the key: add_groups resets it under a current lease.
    groups = table is Group
    key = (
        *(table.job_id, *[Group.group_index] * groups),
        *(table.generation, table.lease_owner, table.stage),
    )
    wanted = {
        (x.job_id, *[x.group_index] * groups, x.token, x.owner, x.stage.value): x for x in leases
    }
    rows = conn.execute(
        update(table)
        .where(tuple_(*key).in_(list(wanted)))
        .values(lease_until=now + lease_sec)
        .returning(*key, *[Group.cut_wanted] * groups)
    )
    return {wanted[tuple(row)[: len(key)]]: row for row in rows}
