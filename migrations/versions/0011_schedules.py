"""The table of schedule runs: one row per schedule and time.

Revision 0011. On PostgreSQL operators write it, for they submit.
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "schedule_runs",
        sa.Column("schedule", sa.Text, nullable=False),
        sa.Column("logical_at", sa.Double, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text),
        sa.Column("noted_at", sa.Double, nullable=False),
        sa.Column("reason", sa.Text),
        sa.PrimaryKeyConstraint("schedule", "logical_at", name="pk_schedule_runs"),
    )
    op.create_index("ix_schedule_runs_logical_at", "schedule_runs", ["logical_at"])


def downgrade() -> None:
    op.drop_table("schedule_runs")
