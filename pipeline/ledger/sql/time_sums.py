"""Sums over slices and completions: what is read of time and money."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, case, func, literal_column, select

from specbatch.pipeline.ledger.sql.time_ledger import IN_FLIGHT, with_groups
from specbatch.schemas import time_mapper
from specbatch.schemas.provenance import Ticks
from specbatch.schemas.tables import Completion
from specbatch.schemas.time_tables import TimeSlice, WorkerSession
from specbatch.schemas.timekeeping import HINTS, JobTime, RowTime

_KINDS = tuple(f"{kind}_ticks" for kind in Ticks.__slots__)


def job_times(conn: Connection, job_id: str | None) -> list[JobTime]:
    of: dict[str, Any] = {
        "job_id": TimeSlice.job_id,
        "price_microusd": WorkerSession.price_microusd,
        "kept": TimeSlice.kept,
        "in_flight": IN_FLIGHT,
        # No parameter: one in SELECT would not be known for the same as one in GROUP BY.
        "hints": TimeSlice.generation == literal_column(str(HINTS)),
    }
    named = [column.label(name) for name, column in of.items()]
    query = with_groups(select(*named, *_sums(TimeSlice))).group_by(*of.values())
    if job_id is not None:
        query = query.where(TimeSlice.job_id == job_id)
    found = [time_mapper.job_time(row) for row in conn.execute(query)]
    return sorted(found, key=lambda t: (t.job_id, t.price_microusd, t.kept, t.in_flight, t.hints))


def row_times(conn: Connection, job_id: str | None) -> list[RowTime]:
    of = (
        Completion.job_id,
        Completion.tag,
        Completion.price_microusd,
        Completion.ahead_price_microusd,
    )
    first = Completion.sample_index == 0
    query = select(
        *of,
        *_sums(Completion),
        func.sum(Completion.ahead_ticks).label("ahead_ticks"),
        func.sum(case((first, 1), else_=0)).label("documents"),
        func.count().label("completions"),
        func.sum(case((first, Completion.prompt_tokens), else_=0)).label("prompt_tokens"),
        func.sum(_tokens(conn)).label("completion_tokens"),
        func.sum(Completion.accepted).label("accepted"),
    ).group_by(*of)
    if job_id is not None:
        query = query.where(Completion.job_id == job_id)
    found = [time_mapper.row_time(row) for row in conn.execute(query)]
    return sorted(
        found, key=lambda t: (t.job_id, t.tag or "", t.price_microusd, t.ahead_price_microusd)
    )


def _tokens(conn: Connection) -> ColumnElement[int]:
    """Of a completion; where its texts were purged, by the origins that stay."""
    if conn.dialect.name != "postgresql":
        return func.json_array_length(Completion.origins)
    kept = func.cardinality(Completion.logprobs)  # quicker than to unpack
    return case(
        (kept > 0, kept), else_=func.cardinality(func.specbatch_origins(Completion.origins))
    )


def _sums(table: type[TimeSlice] | type[Completion]) -> list[Any]:
    return [func.sum(getattr(table, name)).label(name) for name in _KINDS]
