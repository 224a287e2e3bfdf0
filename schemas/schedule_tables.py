"""Runs of schedules. The table outlives jobs, so that no time ever runs twice."""

from __future__ import annotations

from sqlalchemy import Index
from sqlalchemy.orm import Mapped, mapped_column

from specbatch.schemas.tables import Base
from specbatch.schemas.text_columns import AnyText


class ScheduleRun(Base):
    """The run of one logical time of one schedule."""

    __tablename__ = "schedule_runs"

    schedule: Mapped[str] = mapped_column(primary_key=True)
    logical_at: Mapped[float] = mapped_column(primary_key=True)
    state: Mapped[str]
    job_id: Mapped[str | None]  # no key of `jobs`: the time was had, whatever becomes of the job
    noted_at: Mapped[float]
    reason: Mapped[str | None] = mapped_column(AnyText)


Index("ix_schedule_runs_logical_at", ScheduleRun.logical_at)
