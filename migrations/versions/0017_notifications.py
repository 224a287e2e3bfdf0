"""Notifications of jobs' ends: one row per event and target, until it is sent or given up.

Revision 0017. Jobs submitted before have no targets, and get no rows.
"""

import sqlalchemy as sa
from alembic import op

from specbatch.migrations.shared import of_job, where

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.create_table(
        "notifications",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=True),
        sa.Column("sent_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        of_job("notifications"),
        sa.PrimaryKeyConstraint("job_id", "number", "target", name="pk_notifications"),
    )
    due = where(sa.text("due_at IS NOT NULL"))
    op.create_index("ix_notifications_due", "notifications", ["due_at"], **due)


def downgrade() -> None:
    op.drop_table("notifications")
