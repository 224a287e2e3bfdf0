"""What deciding who is next needs, what ends a job early, and groups that are cut in two.

Revision 0004. Jobs and groups that are there keep their meaning: normal priority, no deadline, no
budget, nothing cut.
"""

import sqlalchemy as sa
from alembic import op

from specbatch.migrations.shared import NewColumn, add_columns_without_defaults, drop_columns

revision = "0004"
down_revision = "0003"

_OF_JOBS: tuple[NewColumn, ...] = (
    ("priority", sa.SmallInteger, "1"),
    ("deadline_at", sa.Double, None),
    ("budget_usd", sa.Double, None),
    ("stop_reason", sa.Text, None),
    ("groups_cut", sa.Integer, "0"),
)
_OF_GROUPS: tuple[NewColumn, ...] = (
    ("row_start", sa.Integer, "0"),
    ("row_stop", sa.Integer, None),
    ("cut_wanted", sa.Boolean, sa.false()),
)


def upgrade() -> None:
    add_columns_without_defaults("jobs", _OF_JOBS)
    add_columns_without_defaults("groups", _OF_GROUPS)
    op.create_table(
        "tenants",
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("weight", sa.Double, nullable=False),
        sa.Column("served", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("tenant", name="pk_tenants"),
    )


def downgrade() -> None:
    op.drop_table("tenants")
    for table, columns in (("groups", _OF_GROUPS), ("jobs", _OF_JOBS)):
        drop_columns(table, [name for name, _, _ in columns])
