"""Parts of outputs that are written while their jobs run.

Revision 0029. Taking it back loses the notes: a job's publication then writes all parts itself, and
deletes what lies in the staging folder.
"""

import sqlalchemy as sa
from alembic import op

from specbatch.migrations.shared import of_job

revision = "0029"
down_revision = "0028"


def upgrade() -> None:
    op.create_table(
        "staged_parts",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("token", sa.Text(), nullable=False),
        sa.Column("lease_until", sa.Double(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("schema_version", sa.Integer(), nullable=True),
        sa.Column("rows", sa.Integer(), nullable=True),
        sa.Column("rejected", sa.Integer(), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=True),
        sa.Column("sha256", sa.Text(), nullable=True),
        sa.Column("next_row", sa.BigInteger(), nullable=True),
        sa.Column("next_skip", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_staged_parts"),
        of_job("staged_parts"),
    )


def downgrade() -> None:
    op.drop_table("staged_parts")
