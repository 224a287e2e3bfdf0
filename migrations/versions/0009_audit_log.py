"""An append-only log with a hash chain over completions and over what was done to jobs; audits.

Revision 0009. Jobs and completions that are there have no log: the next thing that happens to such
a job begins one, which tells of what comes after.
"""

import sqlalchemy as sa
from alembic import op

from specbatch.migrations.shared import add_columns, drop_columns, on_postgres
from specbatch.schemas.audit_tables import DROP_FUNCTION, TRIGGERS

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    of_jobs = [("log_number", sa.BigInteger, "0"), ("log_head", sa.LargeBinary, None)]
    add_columns("jobs", of_jobs)
    op.add_column("completions", sa.Column("digest", sa.LargeBinary(), nullable=True))
    _make_tables()
    for statement in TRIGGERS[op.get_context().dialect.name]:
        op.execute(statement)


def downgrade() -> None:
    op.drop_table("audit_findings")
    op.drop_index("ix_audits_job_id", "audits")
    op.drop_table("audits")
    op.drop_table("audit_log")
    on_postgres([DROP_FUNCTION])
    drop_columns("completions", ["digest"])
    drop_columns("jobs", ["log_head", "log_number"])


def _make_tables() -> None:
    op.create_table(
        "audit_log",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("previous", sa.LargeBinary(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_audit_log"),
    )
    op.create_table(
        "audits",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("sampled", sa.Integer(), nullable=False),
        sa.Column("differing", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("intact", sa.Boolean(), nullable=False),
        sa.Column("note", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_audits"),
    )
    op.create_index("ix_audits_job_id", "audits", ["job_id", "at"])
    op.create_table(
        "audit_findings",
        sa.Column("audit_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("place", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("what", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=True),
        sa.Column("row_index", sa.BigInteger(), nullable=True),
        sa.Column("sample_index", sa.Integer(), nullable=True),
        sa.Column("position", sa.Integer(), nullable=True),
        sa.Column("written_token", sa.Integer(), nullable=True),
        sa.Column("decided_token", sa.Integer(), nullable=True),
        sa.Column("margin", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["audit_id"],
            ["audits.id"],
            name="fk_audit_findings_audit_id_audits",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("audit_id", "place", name="pk_audit_findings"),
    )
