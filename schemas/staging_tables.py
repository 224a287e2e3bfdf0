"""The table of parts that are written before their job is published."""

from __future__ import annotations

from sqlalchemy import BigInteger, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from specbatch.schemas.tables import Base


class Staged(Base):
    """A part of a running job's output: claimed, or written where it has a SHA-256."""

    __tablename__ = "staged_parts"

    job_id: Mapped[str] = mapped_column(
        ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    token: Mapped[str]  # another with each claim: writes name it
    lease_until: Mapped[float]
    attempts: Mapped[int]
    schema_version: Mapped[int | None]  # of the output's columns
    rows: Mapped[int | None]
    rejected: Mapped[int | None]
    size_bytes: Mapped[int | None] = mapped_column(BigInteger)
    sha256: Mapped[str | None]
    next_row: Mapped[int | None] = mapped_column(BigInteger)  # where the next part begins …
    next_skip: Mapped[int | None]  # … and how many output rows of it are in the parts before
