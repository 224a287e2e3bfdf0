"""Groups are split in two: those that may kill workers, and those an idle worker takes over.

The caller has locked the job's row, so new groups are numbered one after another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    exists,
    func,
    insert,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.orm import aliased

from specbatch.pipeline.ledger import rules, split_rules
from specbatch.pipeline.ledger.sql import budgets, jobs, pinning, residency
from specbatch.pipeline.ledger.sql.jobs import FREE
from specbatch.pipeline.ledger.sql.transactions import Now
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.placement import Site
from specbatch.schemas.records import FIRST_SPLIT_INDEX, Lease, Stage
from specbatch.schemas.tables import Group, Job, group_is_open

_HELD = aliased(Group)  # made once: its many columns are slow to make

# Columns that the new group shares with the group it is split from.
_SHARED = ("job_id", "first_stage", "source", "prompts", "drafts", "results")


def in_halves(conn: Connection, now: Now, job: Any, row: Any, max_attempts: int, error: str) -> int:
    """Split a group that nobody holds any more; return the second half's index.

    `row` is the group's, whole and locked. Both halves keep the error and have one attempt left
    (single rows: all). The fencing token rises, so that a late holder of the whole is fenced.
    """

    def values(part: split_rules.Slice) -> dict[str, Any]:
        attempts = split_rules.attempts_spent(part.rows, max_attempts)
        return {"ready_at": now, "attempts": attempts, "last_error": error}

    first, rest = split_rules.split(_slice(row), split_rules.half(row.rows))
    stays = {**values(first), **FREE, "generation": Group.generation + 1}
    return _split(conn, job, row, (first, stays), (rest, values(rest)))


def split_group(conn: Connection, now: Now, lease: Lease, keep: int) -> int:
    """Give back all but the first `keep` rows of a group held at VERIFY; return their index."""
    job = jobs.lock(conn, lease.job_id)
    held = select(*Group.__table__.c).where(*is_held(lease)).with_for_update()
    row = conn.execute(held).first()
    if row is None or lease.stage is not Stage.VERIFY:
        raise rules.fenced(lease)
    first, rest = split_rules.split(_slice(row), keep)
    return _split(conn, job, row, (first, {}), (rest, {"ready_at": now}))


def _split(
    conn: Connection,
    job: Any,
    row: Any,
    first: tuple[split_rules.Slice, Mapping[str, Any]],
    rest: tuple[split_rules.Slice, Mapping[str, Any]],
) -> int:
    """Write both parts, each a slice and its other values."""
    index: int = FIRST_SPLIT_INDEX + job.groups_cut
    of_both = [_bounds(row, part[0].rows) for part in (first, rest)]
    if row.stage != Stage.RECORD.value:
        of_both[1]["reserved_tokens"] = 0  # nobody holds the rest
    same = {name: getattr(row, name) for name in _SHARED}
    conn.execute(
        update(Group)
        .where(Group.job_id == row.job_id, Group.group_index == row.group_index)
        .values(cut_wanted=False, **_values(first[0]), **of_both[0], **first[1])
    )
    conn.execute(
        insert(Group).values(
            **same, group_index=index, stage=row.stage, **_values(rest[0]), **of_both[1], **rest[1]
        )
    )
    conn.execute(update(Job).where(Job.job_id == row.job_id).values(groups_cut=Job.groups_cut + 1))
    return index


def failed_halves(conn: Connection, job_id: str) -> int:
    """How many of a job's groups were split off and failed since, or with their whole.

    What an idle worker took over counts only once it has failed itself.
    """
    split_off = Group.group_index >= FIRST_SPLIT_INDEX
    failed = (Group.job_id == job_id, split_off, Group.last_error.is_not(None))
    return conn.scalars(select(func.count()).where(*failed)).one()


def _slice(row: Any) -> split_rules.Slice:
    return split_rules.Slice(row.row_start, row.rows, row.prompt_tokens)


def _bounds(row: Any, rows: int) -> dict[str, Any]:
    """Of a part with so many of the group's rows. Which rows are long is not known here, so each
    part may have more than its share, and both together more than the whole."""
    most = min(row.most_tokens, rows * row.most_row_tokens)
    reserved = min(row.reserved_tokens, most)
    return {
        "most_tokens": most,
        "most_row_tokens": row.most_row_tokens,
        "reserved_tokens": reserved,
    }


def _values(part: split_rules.Slice) -> dict[str, Any]:
    return {
        "row_start": part.row_start,
        "row_stop": part.row_stop,
        "rows": part.rows,
        "prompt_tokens": part.prompt_tokens,
    }


# --- who may claim what ---------------------------------------------------------------------


def one_suspect_at_a_time(
    now: Now, stage: Stage, owner: str, max_attempts: int
) -> ColumnElement[bool]:
    """What is true of a group that `owner` may claim: nobody holds two suspects at a stage."""
    has_one = exists().where(
        _HELD.lease_owner == owner,
        _HELD.lease_until > now,
        _HELD.stage == stage.value,
        is_suspect(_HELD, _HELD.attempts - 1, max_attempts),
    )
    return ~is_suspect(Group, Group.attempts, max_attempts) | ~has_one


def is_suspect(group: Any, attempts: Any, max_attempts: int) -> ColumnElement[bool]:
    """`split_rules.is_suspect` in SQL."""
    last = attempts >= max_attempts - 1
    failed_part = group.row_stop.is_not(None) & group.last_error.is_not(None)
    return or_(and_(attempts > 0, last), and_(failed_part, or_(last, group.rows == 1)))


def is_held(lease: Lease) -> list[ColumnElement[bool]]:
    """The conditions of a group's row while the lease is current."""
    return held_by(lease.job_id, lease.group_index, lease.token, lease.owner, lease.stage.value)


def held_by(
    job_id: Any, group_index: Any, token: Any, owner: Any, stage: Any
) -> list[ColumnElement[bool]]:
    """The same of a lease's values, or of parameters for them."""
    return [
        Group.job_id == job_id,
        Group.group_index == group_index,
        Group.generation == token,
        Group.lease_owner == owner,
        Group.stage == stage,
    ]


# --- what the idle ask for ------------------------------------------------------------------


def ask_for_split(
    conn: Connection,
    now: Now,
    model: str,
    owner: str,
    serves: Serves | None = None,
    site: Site | None = None,
    jobs: Collection[str] | None = None,
) -> tuple[str, int] | None:
    """Mark the group that an idle verifier would like half of. It must be able to verify it."""
    due, of_due = aliased(Group), aliased(Job)
    held_back = [one.job_id for one in budgets.shortfalls(conn, now)]
    anything_due = (
        exists()
        .where(due.stage == Stage.VERIFY.value, due.lease_until <= now)
        .where(of_due.job_id == due.job_id, of_due.verifier == model)
        .where(*pinning.served(serves, of_due), *residency.placed(site, of_due))
        .where(true() if jobs is None else of_due.job_id.in_(jobs))
        .where(of_due.job_id.not_in(held_back) if held_back else true())
    )
    drafted = aliased(Group)
    still_drafting = exists().where(
        drafted.job_id == Group.job_id, drafted.stage == Stage.PROPOSE.value
    )
    row = conn.execute(
        select(Group.job_id, Group.group_index)
        .join(Job, Job.job_id == Group.job_id)
        .where(
            group_is_open(),  # spelled out for the index
            Group.stage == Stage.VERIFY.value,
            Group.lease_until > now,
            Group.lease_owner != owner,
            ~Group.cut_wanted,
            Group.rows > 1,
            Job.stage == Stage.RUN.value,
            Job.verifier == model,
            *pinning.served(serves),
            *residency.placed(site),
            true() if jobs is None else Job.job_id.in_(jobs),
            ~Job.cancel_requested,
            ~anything_due,
            ~still_drafting,
        )
        .order_by(
            Group.rows.desc(),
            (Group.ready_at + Group.waited_sec).desc(),  # when it was claimed
            Group.job_id,
            Group.group_index,
        )
        .limit(1)
        .with_for_update(skip_locked=True, of=Group)
    ).first()
    if row is None:
        return None
    this = (Group.job_id == row.job_id, Group.group_index == row.group_index)
    conn.execute(update(Group).where(*this).values(cut_wanted=True))
    return row.job_id, row.group_index
