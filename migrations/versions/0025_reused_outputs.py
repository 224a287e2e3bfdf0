"""Outputs that are reused: which completion answered a request, and which are copies.

Revision 0025. Jobs from before offer nothing. Taking it back loses which completions are copies.
"""

import sqlalchemy as sa
from alembic import op

from specbatch.migrations.shared import drop_columns, on_postgres
from specbatch.schemas import token_record
from specbatch.schemas.sql_roles import granting
from specbatch.schemas.sql_triggers import creating

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    op.create_table(
        "reusable_outputs",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("row_index", sa.BigInteger(), nullable=False),
        sa.Column("sample_index", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "request", name="pk_reusable_outputs"),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["jobs.job_id"],
            name="fk_reusable_outputs_job_id_jobs",
            ondelete="CASCADE",
        ),
    )
    op.create_index("ix_reusable_outputs_job_id", "reusable_outputs", ["job_id"])
    op.add_column("completions", sa.Column("reused_from", sa.Text(), nullable=True))
    op.execute("DROP VIEW token_record")
    op.execute(token_record.view(op.get_context().dialect.name))
    on_postgres(creating())


def downgrade() -> None:
    op.execute("DROP VIEW token_record")
    drop_columns("completions", ["reused_from"])
    op.execute(token_record.view(op.get_context().dialect.name, with_reuse=False))
    on_postgres(granting())
    op.drop_table("reusable_outputs")
