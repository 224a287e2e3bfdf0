"""Heartbeats: the leases of one process in few statements, however many they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, select, tuple_, update

from specbatch.pipeline.ledger.sql.transactions import Now
from specbatch.schemas.records import Beat, Lease
from specbatch.schemas.tables import Group, Job

_LEASES_PER_STATEMENT = 500


def heartbeat(conn: Connection, now: Now, leases: Sequence[Lease], lease_sec: float) -> Beat:
    lost, cut_wanted = set(leases), set[Lease]()
    # All jobs before all groups, as in `jobs`: a commit holds its job and wants a group.
    for part in _parts([x for x in leases if x.group_index is None]):
        lost -= _extend_jobs(conn, now, part, lease_sec)
    for part in _parts([x for x in leases if x.group_index is not None]):
        held, asked_for = _extend_groups(conn, now, part, lease_sec)
        lost -= held
        cut_wanted |= asked_for
    job_ids = {lease.job_id for lease in leases}
    cancelled = conn.scalars(
        select(Job.job_id).where(Job.job_id.in_(job_ids), Job.cancel_requested)
    )
    return Beat(lost, set(cancelled), cut_wanted)


def _parts(leases: Sequence[Lease]) -> Iterator[Sequence[Lease]]:
    """In the order of their keys, as many as one statement takes."""
    ordered = sorted(leases, key=lambda lease: (lease.job_id, lease.group_index or 0))
    for start in range(0, len(ordered), _LEASES_PER_STATEMENT):
        yield ordered[start : start + _LEASES_PER_STATEMENT]


def _extend_groups(
    conn: Connection, now: Now, leases: Sequence[Lease], lease_sec: float
) -> tuple[set[Lease], set[Lease]]:
    """(those that are current, and of these the ones whose group somebody wants cut)."""
    key = (
        Group.job_id,
        Group.group_index,
        Group.generation,
        Group.lease_owner,
        Group.stage,
    )
    wanted = {(x.job_id, x.group_index, x.generation, x.owner, x.stage.value): x for x in leases}
    held = _extend(conn, Group, key, wanted, now, lease_sec, Group.cut_wanted)
    return set(held), {lease for lease, row in held.items() if row.cut_wanted}


def _extend_jobs(
    conn: Connection, now: Now, leases: Sequence[Lease], lease_sec: float
) -> set[Lease]:
    key = (Job.job_id, Job.generation, Job.lease_owner, Job.stage)
    wanted = {(x.job_id, x.generation, x.owner, x.stage.value): x for x in leases}
    return set(_extend(conn, Job, key, wanted, now, lease_sec))


def _extend(
    conn: Connection,
    table: type[Job] | type[Group],
    key: tuple[Any, ...],
    wanted: dict[Any, Lease],
    now: Now,
    lease_sec: float,
    *also: Any,
) -> dict[Lease, Any]:
    """The leases among `wanted` that are current, with their rows; their time is extended.

    A row has the key's columns, then those of `also`.
    """
    if not wanted:
        return {}
    rows = conn.execute(
        update(table)
        .where(tuple_(*key).in_(list(wanted)))
        .values(lease_until=now + lease_sec)
        .returning(*key, *also)
    )
    # `attempt` is no part of the key, for add_groups resets it under a current lease.
    return {wanted[tuple(row)[: len(key)]]: row for row in rows}
