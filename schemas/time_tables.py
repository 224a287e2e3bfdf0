"""Tables of device time: counters in ticks, which only grow. See `ledger/contract.py`."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from specbatch.schemas.tables import Base


def _ticks() -> Any:
    return mapped_column(BigInteger, default=0)


class WorkerSession(Base):
    """One device in one worker process, from its start to its last known moment."""

    __tablename__ = "worker_sessions"

    session_id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    device_kind: Mapped[str]
    region: Mapped[str]
    tenure: Mapped[str]
    price_microusd: Mapped[int] = mapped_column(BigInteger)  # of an hour
    started_at: Mapped[float]
    beat_at: Mapped[float]  # when its process was heard of last
    ended_at: Mapped[float | None]
    seen_ticks: Mapped[int] = _ticks()
    idle_ticks: Mapped[int] = _ticks()
    overhead_ticks: Mapped[int] = _ticks()
    lost_ticks: Mapped[int] = _ticks()  # written when it ends, with …
    leased_ticks: Mapped[int | None] = mapped_column(BigInteger)  # … the sum of all of them
    # The model and numeric classes that it verifies with; NULL: it verifies nothing.
    serves: Mapped[dict[str, Any] | None]


class WorkerProcess(Base):
    """One live worker process. Devices and their cost are in `WorkerSession`."""

    __tablename__ = "worker_processes"

    process_id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    kinds: Mapped[str]  # of work, with commas between them
    verifier: Mapped[str | None]
    proposer: Mapped[str | None]
    started_at: Mapped[float]
    heard_at: Mapped[float]  # its last heartbeat
    trouble: Mapped[str | None]  # why it can take no messages; NULL: it can


class TimeSlice(Base):
    """The device time that one attempt at a group took from one session."""

    __tablename__ = "time_slices"

    # No key of `jobs`: what was paid for stays, whatever becomes of the job's row.
    job_id: Mapped[str] = mapped_column(primary_key=True)
    group_index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    generation: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    session_id: Mapped[str] = mapped_column(
        ForeignKey("worker_sessions.session_id"), primary_key=True
    )
    stage: Mapped[str]
    kept: Mapped[bool]  # its results were
    prefill_ticks: Mapped[int] = _ticks()
    verify_ticks: Mapped[int] = _ticks()
    draft_ticks: Mapped[int] = _ticks()
    rejected_ticks: Mapped[int] = _ticks()
    padding_ticks: Mapped[int] = _ticks()
    overhead_ticks: Mapped[int] = _ticks()


_open = WorkerSession.ended_at.is_(None)
Index("ix_worker_sessions_open", WorkerSession.beat_at, sqlite_where=_open, postgresql_where=_open)
Index("ix_time_slices_session_id", TimeSlice.session_id)
