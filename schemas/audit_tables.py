"""Tables of the audit log and of audits, and the triggers that keep the log as it was written.

These tables have no foreign key to `jobs`, because the record of what was done outlives the job.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import (
    DDL,
    BigInteger,
    Connection,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    event,
)
from sqlalchemy.orm import Mapped, mapped_column

from specbatch.schemas import sql_triggers
from specbatch.schemas.tables import Base
from specbatch.schemas.text_columns import AnyText


class AuditLog(Base):
    """One entry of a job's log. Triggers allow INSERT and refuse every change."""

    __tablename__ = "audit_log"

    job_id: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    kind: Mapped[str]
    at: Mapped[float]
    actor: Mapped[str] = mapped_column(AnyText)
    payload: Mapped[str]  # canonical JSON as text, because a JSON column would reformat it
    previous: Mapped[bytes] = mapped_column(LargeBinary)
    hash: Mapped[bytes] = mapped_column(LargeBinary)


class Audit(Base):
    """One audit of a job."""

    __tablename__ = "audits"

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True
    )  # SQLite counts up INTEGER keys only
    job_id: Mapped[str]
    at: Mapped[float]
    actor: Mapped[str] = mapped_column(AnyText)
    sampled: Mapped[int]
    differing: Mapped[int]
    tokens: Mapped[int] = mapped_column(BigInteger)
    intact: Mapped[bool]
    note: Mapped[str | None] = mapped_column(AnyText)


class AuditFinding(Base):
    """One finding of an audit."""

    __tablename__ = "audit_findings"

    audit_id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"),
        ForeignKey("audits.id", ondelete="CASCADE"),
        primary_key=True,
    )
    place: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # in the audit
    kind: Mapped[str]
    what: Mapped[str] = mapped_column(AnyText)
    number: Mapped[int | None] = mapped_column(BigInteger)
    row_index: Mapped[int | None] = mapped_column(BigInteger)
    sample_index: Mapped[int | None]
    position: Mapped[int | None]
    written_token: Mapped[int | None]
    decided_token: Mapped[int | None]
    margin: Mapped[float | None]


Index("ix_audits_job_id", Audit.job_id, Audit.at)

_REFUSED = "the audit log is only added to"

# Dialect: what makes the triggers. Dropping the table drops them, but for the function.
TRIGGERS: Mapping[str, tuple[str, ...]] = {
    "sqlite": tuple(
        f"CREATE TRIGGER audit_log_no_{verb} BEFORE {verb.upper()} ON audit_log "
        f"BEGIN SELECT RAISE(ABORT, '{_REFUSED}'); END"
        for verb in ("update", "delete")
    ),
    "postgresql": (
        "CREATE OR REPLACE FUNCTION audit_log_refuse() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{_REFUSED}'; END $$",
        "CREATE TRIGGER audit_log_no_update BEFORE UPDATE OR DELETE ON audit_log "
        "FOR EACH ROW EXECUTE FUNCTION audit_log_refuse()",
        "CREATE TRIGGER audit_log_no_truncate BEFORE TRUNCATE ON audit_log "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_log_refuse()",
    ),
}
DROP_FUNCTION = "DROP FUNCTION IF EXISTS audit_log_refuse()"  # of PostgreSQL, after the table

for _dialect, _statements in TRIGGERS.items():
    for _statement in _statements:
        _made = DDL(_statement).execute_if(dialect=_dialect)  # type: ignore[no-untyped-call]  # SQLAlchemy's own
        event.listen(AuditLog.__table__, "after_create", _made)


@event.listens_for(Base.metadata, "after_create")
def _hold_roles(_metadata: MetaData, connection: Connection, **_: object) -> None:
    if connection.dialect.name == "postgresql":
        for statement in sql_triggers.creating():
            connection.exec_driver_sql(statement)
