"""Numeric classes: what workers verify in, what jobs have chosen, what completions were decided in.

Revision 0012. Jobs that are there get the class `unknown`: any worker may go on with them.
"""

import sqlalchemy as sa
from alembic import op

from specbatch.migrations.shared import drop_columns

revision = "0012"
down_revision = "0011"

_TABLES = ("jobs", "completions")


def upgrade() -> None:
    for table in _TABLES:
        op.add_column(table, sa.Column("numeric_class", sa.Text(), nullable=True))
    op.add_column("worker_sessions", sa.Column("serves", sa.JSON(), nullable=True))
    op.execute("UPDATE jobs SET numeric_class = 'unknown'")


def downgrade() -> None:
    drop_columns("worker_sessions", ["serves"])
    for table in reversed(_TABLES):
        drop_columns(table, ["numeric_class"])
