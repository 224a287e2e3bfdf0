"""The part of `SqlStore` that keeps time: each method is one transaction or more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from specbatch.pipeline.ledger.sql import time_ledger, time_sums
from specbatch.pipeline.ledger.sql.transactions import Now, Transactions
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.provenance import Ticks
from specbatch.schemas.timekeeping import (
    Attempt,
    JobTime,
    NewSession,
    RowTime,
    SessionRow,
    SessionTime,
    TimeSlice,
)

P = ParamSpec("P")
T = TypeVar("T")


class SqlTime:
    """Sessions and what attempts had of them, on the database of the whole store."""

    _db: Transactions

    def begin_session(self, session: NewSession) -> None:
        self._write(time_ledger.begin, session)

    def announce(self, session_id: str, serves: Serves) -> None:
        self._write(time_ledger.announce, session_id, serves)

    def tell_time(self, session: SessionTime, attempts: Mapping[Attempt, Ticks]) -> None:
        self._write(time_ledger.tell, session, attempts)

    def end_session(self, session: SessionTime, attempts: Mapping[Attempt, Ticks]) -> None:
        self._write(time_ledger.end, session, attempts)

    def end_silent_sessions(self, patience_sec: float) -> list[str]:
        now = self._db.now()
        found = self._db.read(lambda conn: time_ledger.silent(conn, now, patience_sec))
        ended = [i for i in found if self._write(time_ledger.end_silent, i, patience_sec)]
        return sorted(ended)

    def sessions(
        self, job_id: str | None = None, session_id: str | None = None
    ) -> list[SessionRow]:
        return self._db.read(lambda conn: time_ledger.sessions(conn, job_id, session_id))

    def time_slices(
        self, job_id: str | None = None, session_id: str | None = None
    ) -> Iterator[TimeSlice]:
        return time_ledger.slices(self._db, job_id, session_id)

    def job_times(self, job_id: str | None = None) -> Sequence[JobTime]:
        return self._db.read(lambda conn: time_sums.job_times(conn, job_id))

    def row_times(self, job_id: str | None = None) -> Sequence[RowTime]:
        return self._db.read(lambda conn: time_sums.row_times(conn, job_id))

    def _write(
        self, work: Callable[Concatenate[Connection, Now, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return self._db.write(lambda conn: work(conn, self._db.now(), *args, **kwargs))
