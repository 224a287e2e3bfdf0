"""Schedules run more than jobs: attempts at a time, when the newest began, what it found.

Revision 0022. Taking it back loses these.
"""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    with op.batch_alter_table("schedule_runs") as table:
        table.add_column(sa.Column("attempts", sa.Integer(), nullable=False, server_default="0"))
        table.add_column(sa.Column("started_at", sa.Double(), nullable=True))
        table.add_column(sa.Column("found", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("schedule_runs") as table:
        table.drop_column("found")
        table.drop_column("started_at")
        table.drop_column("attempts")
