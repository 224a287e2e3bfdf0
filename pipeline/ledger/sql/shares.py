"""A tenant's virtual time in its row: charged by each claim, and settled when an attempt ends.

Both are one statement that reads the row which it changes, so claimers that come at once add up.
The tenant's row is locked last, after those of job and group.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Executable,
    SQLColumnExpression,
    bindparam,
    case,
    func,
    literal,
    select,
    update,
)

from specbatch.pipeline.ledger.fair_share import Turn
from specbatch.pipeline.ledger.sql import pinning
from specbatch.pipeline.ledger.sql.transactions import upsert
from specbatch.schemas.numeric_class import Pinned
from specbatch.schemas.provenance import TICKS_PER_SEC, Ticks
from specbatch.schemas.records import Lease, Stage
from specbatch.schemas.tables import Group, Job, Tenant, TimeSlice

_NEWEST = 0.2  # the share of the newest group in what a tenant's tokens take
_NONE = literal(0.0, Double)
RATE = "of_rate"  # parameter of a claim: device seconds per token


def estimate() -> ColumnElement[Any]:
    """The device seconds that a group is charged with when it is claimed."""
    return Group.most_tokens * _number(RATE)


def charge(conn: Connection, turn: Turn, group_index: int) -> Pinned:
    """Advance the tenant's virtual time by the estimate in the group's row.

    Returns what the job has pinned, which costs no statement here.
    """
    parameters = {
        "of_job": turn.job.job_id,
        "of_index": group_index,
        "of_tenant": turn.job.tenant,
        "new_weight": turn.job.weight,
        "floor": turn.floor,
        "reached": turn.reached,
    }
    return Pinned(*conn.execute(_charging(conn.dialect.name), parameters).one())


@lru_cache(maxsize=2)
def _charging(dialect: str) -> Executable:
    floor, reached, weight = _number("floor"), _number("reached"), _number("new_weight")
    cost = _of_group(Group.charged_sec) / weight
    start = _larger(Tenant.served, floor - Tenant.credit)
    behind = _smaller(Tenant.credit, floor - start)
    known = {
        "weight": weight,
        # A job that went ahead of its turn must not take the others with it.
        "started": _smaller(start, reached),
        "served": start + cost,
        "credit": _larger(behind, _NONE),
    }
    first = {
        "tenant": bindparam("of_tenant"),
        "weight": weight,
        "started": _smaller(floor, reached),
        "served": floor + cost,
        "credit": 0.0,
        "sec_per_token": 0.0,
    }
    made: Executable = (
        upsert(dialect, Tenant)
        .values(**first)
        .on_conflict_do_update(index_elements=[Tenant.tenant], set_=known)
        .returning(*pinning.pinned_columns())
    )
    return made


def settle(conn: Connection, lease: Lease, device_sec: float, is_whole: bool = True) -> None:
    """Replace the estimate of an attempt that ends by what it took.

    A whole group that was verified tells what the tokens of the tenant's next ones will take.
    """
    parameters = {"of_job": lease.job_id, "of_index": lease.group_index, "device_sec": device_sec}
    conn.execute(_settling(is_whole and lease.stage is Stage.VERIFY), parameters)


def settle_given_back(conn: Connection, lease: Lease) -> None:
    """The same of an attempt whose group is given back: it took what was reported of it so far."""
    ticks = sum(getattr(TimeSlice, f"{kind}_ticks") for kind in Ticks.__slots__)
    reported = select(func.coalesce(func.sum(ticks), 0)).where(
        TimeSlice.job_id == lease.job_id,
        TimeSlice.group_index == lease.group_index,
        TimeSlice.generation == lease.token,
    )
    settle(conn, lease, float(conn.scalar(reported) or 0) / TICKS_PER_SEC, is_whole=False)


@lru_cache(maxsize=2)
def _settling(learns: bool) -> Executable:
    took, tokens = _number("device_sec"), _of_group(Group.most_tokens)
    change = (took - _of_group(Group.charged_sec)) / Tenant.weight
    values = {
        "served": Tenant.served + change,
        "credit": _larger(Tenant.credit - change, _NONE),
    }
    if learns:
        rate, newest = Tenant.sec_per_token, took / tokens
        mixed = case((rate > 0, rate + (newest - rate) * _NEWEST), else_=newest)
        values["sec_per_token"] = case((tokens > 0, mixed), else_=rate)
    tenant = select(Job.tenant).where(Job.job_id == bindparam("of_job")).scalar_subquery()
    return update(Tenant).where(Tenant.tenant == tenant).values(**values)


def _of_group(column: SQLColumnExpression[Any]) -> ColumnElement[float]:
    this = (Group.job_id == bindparam("of_job"), Group.group_index == bindparam("of_index"))
    return select(column).where(*this).correlate(None).scalar_subquery()


def _number(name: str) -> ColumnElement[float]:
    return bindparam(name, type_=Double)


def _larger(a: SQLColumnExpression[float], b: SQLColumnExpression[float]) -> ColumnElement[float]:
    return case((a > b, a), else_=b)


def _smaller(a: SQLColumnExpression[float], b: SQLColumnExpression[float]) -> ColumnElement[float]:
    return case((a < b, a), else_=b)
