"""What attempts used beside devices, in SQL. Each function runs inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    Connection,
    Executable,
    case,
    false,
    func,
    literal_column,
    or_,
    select,
)

from specbatch.pipeline.ledger.sql.transactions import Now, upsert
from specbatch.schemas.records import Lease, Stage
from specbatch.schemas.tables import Group, Job, StageUsage
from specbatch.schemas.usage import COUNTERS, NO_GROUP, Quantities, UsageMeter, prices_as_text
from specbatch.schemas.usage import StageUsage as Usage
from specbatch.schemas.usage import prices_of_text as prices_of

_KEY = ("job_id", "group_index", "generation")


def keep(conn: Connection, lease: Lease, meter: UsageMeter | None) -> None:
    """Store what the attempt used in the transaction of its results, this statement included."""
    if meter is not None:
        _add(conn, lease, meter, kept=True)


def report(conn: Connection, _now: Now, meters: Mapping[Lease, UsageMeter]) -> None:
    """Store what attempts used so far, whose results are not kept yet or never will be."""
    for lease, meter in sorted(meters.items(), key=lambda item: _place(item[0])):
        _add(conn, lease, meter, kept=False)


def of_jobs(conn: Connection, job_id: str | None = None) -> list[Usage]:
    """Sums, by job and stage."""
    held_group = (Group.generation == StageUsage.generation) & Group.lease_owner.is_not(None)
    held_job = (Job.generation == StageUsage.generation) & Job.lease_owner.is_not(None)
    # No parameter: one in SELECT would not be known for the same as one in GROUP BY.
    of_job = StageUsage.group_index == literal_column(str(NO_GROUP))
    in_flight = func.coalesce(case((of_job, held_job), else_=held_group), false())
    of: dict[str, Any] = {
        "job_id": StageUsage.job_id,
        "stage": StageUsage.stage,
        "kept": StageUsage.kept,
        "in_flight": in_flight,
        "prices": StageUsage.prices,
    }
    columns: list[Any] = [
        *(column.label(name) for name, column in of.items()),
        func.count().label("attempts"),
        *(func.sum(getattr(StageUsage, name)).label(name) for name in COUNTERS),
    ]
    query = (
        select(*columns)
        .select_from(StageUsage)
        .outerjoin(Job, Job.job_id == StageUsage.job_id)
        .outerjoin(
            Group,
            (Group.job_id == StageUsage.job_id) & (Group.group_index == StageUsage.group_index),
        )
        .group_by(*of.values())
    )
    if job_id is not None:
        query = query.where(StageUsage.job_id == job_id)
    found = [_usage(row) for row in conn.execute(query)]
    return sorted(
        found, key=lambda u: (u.job_id, u.stage, u.kept, u.in_flight, prices_as_text(u.prices))
    )


def _place(lease: Lease) -> tuple[str, int, int]:
    index = NO_GROUP if lease.group_index is None else lease.group_index
    return lease.job_id, index, lease.token


def _add(conn: Connection, lease: Lease, meter: UsageMeter, kept: bool) -> None:
    used = meter.read(store_statements=1)
    values = dict(zip(_KEY, _place(lease), strict=True)) | {
        "stage": lease.stage.value,
        "kept": kept,
        "prices": prices_as_text(meter.prices),
        **{name: getattr(used, name) for name in COUNTERS},
    }
    conn.execute(_adding(conn.dialect.name), values)


@lru_cache(maxsize=2)
def _adding(dialect: str) -> Executable:
    """Keeps the larger counters where there is a row already. A row that is kept may be pinned, so
    only who keeps it changes it: a late report does not."""
    statement = upsert(dialect, StageUsage)
    new = statement.excluded
    larger = {
        name: case(
            (new[name] > getattr(StageUsage, name), new[name]), else_=getattr(StageUsage, name)
        )
        for name in COUNTERS
    }
    done: Executable = statement.on_conflict_do_update(
        index_elements=list(_KEY),
        set_={**larger, "kept": or_(StageUsage.kept, new["kept"])},
        where=or_(StageUsage.kept.is_(False), new["kept"]),
    )
    return done


def _usage(row: Any) -> Usage:
    """Databases may return sums as decimal numbers."""
    return Usage(
        job_id=row.job_id,
        stage=Stage(row.stage),
        kept=bool(row.kept),
        in_flight=bool(row.in_flight),
        prices=prices_of(row.prices),
        attempts=row.attempts,
        used=Quantities(**{name: int(getattr(row, name)) for name in COUNTERS}),
    )
