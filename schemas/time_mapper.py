"""Maps rows of the device-time tables to records and back."""

from __future__ import annotations

from dataclasses import asdict, astuple
from typing import Any

from specbatch.schemas.backlog import WorkerNow
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.provenance import TICKS_PER_SEC, Ticks
from specbatch.schemas.records import Stage
from specbatch.schemas.timekeeping import (
    Attempt,
    Device,
    JobTime,
    NewSession,
    RowTime,
    SessionRow,
    TimeSlice,
)

DEVICE = ("device_kind", "region", "tenure", "price_microusd", "pool", "each_microusd")


def session_values(session: NewSession, now: Any) -> dict[str, Any]:
    return {
        "session_id": session.session_id,
        "owner": session.owner,
        **dict(zip(DEVICE, astuple(session.device), strict=True)),
        "started_at": now - session.age_ticks / TICKS_PER_SEC,
        "beat_at": now,
        "serves": session.serves and session.serves.as_json(),
    }


def slice_values(session_id: str, attempt: Attempt, ticks: Ticks, kept: bool) -> dict[str, Any]:
    return {
        "session_id": session_id,
        **attempt._asdict(),
        "stage": attempt.stage.value,
        "kept": kept,
        **{f"{kind}_ticks": value for kind, value in asdict(ticks).items()},
    }


def session_row(row: Any) -> SessionRow:
    """A session with `spent_ticks`, the sum of its slices."""
    return SessionRow(
        **_session(row),
        started_at=row.started_at,
        ended_at=row.ended_at,
        leased=row.leased_ticks,
        lost=row.lost_ticks,
        spent=int(row.spent_ticks),
    )


def worker_now(row: Any, now: float) -> WorkerNow:
    """An open session, with `leases`, the groups that its process holds."""
    return WorkerNow(
        **_session(row),
        age_sec=now - row.started_at,
        silent_sec=now - row.beat_at,
        leases=row.leases,
    )


def _session(row: Any) -> dict[str, Any]:
    return {
        "session_id": row.session_id,
        "owner": row.owner,
        "device": _device(row),
        "seen": row.seen_ticks,
        "idle": row.idle_ticks,
        "overhead": row.overhead_ticks,
        "serves": Serves.from_json(row.serves),
    }


def time_slice(row: Any) -> TimeSlice:
    return TimeSlice(
        session_id=row.session_id,
        attempt=Attempt(row.job_id, row.group_index, row.generation, Stage(row.stage)),
        ticks=_ticks(row),
        kept=row.kept,
        in_flight=bool(row.in_flight),
        device=_device(row),
    )


def job_time(row: Any) -> JobTime:
    return JobTime(
        job_id=row.job_id,
        stage=Stage(row.stage),
        price_microusd=row.price_microusd,
        kept=bool(row.kept),
        in_flight=bool(row.in_flight),
        hints=bool(row.hints),
        ticks=_ticks(row),
    )


def row_time(row: Any) -> RowTime:
    """Databases may return sums as decimal numbers."""
    same = ("job_id", "tag", "price_microusd", "ahead_price_microusd", "completions")
    sums = ("ahead_ticks", "documents", "prompt_tokens", "completion_tokens", "accepted")
    summed: dict[str, Any] = {name: int(getattr(row, name)) for name in sums}
    return RowTime(
        ticks=_ticks(row),
        **{name: getattr(row, name) for name in same},
        **summed,
    )


def _ticks(row: Any) -> Ticks:
    return Ticks(**{kind: int(getattr(row, f"{kind}_ticks")) for kind in Ticks.__slots__})


def _device(row: Any) -> Device:
    return Device(*(getattr(row, name) for name in DEVICE))
