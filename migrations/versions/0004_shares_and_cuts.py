"""What deciding who is next needs, what ends a job early, and groups that are cut in two.

Revision 0004. Jobs and groups that are there keep their meaning: normal priority, no deadline, no
budget, nothing cut.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

# (name, type, what rows that are there get; None: nothing)
_OF_JOBS = (
    ("priority", sa.SmallInteger, "1"),
    ("deadline_at", sa.Double, None),
    ("budget_usd", sa.Double, None),
    ("stop_reason", sa.Text, None),
    ("groups_cut", sa.Integer, "0"),
)
_OF_GROUPS = (
    ("row_start", sa.Integer, "0"),
    ("row_stop", sa.Integer, None),
    ("cut_wanted", sa.Boolean, sa.false()),
)


def upgrade() -> None:
    for table, columns in (("jobs", _OF_JOBS), ("groups", _OF_GROUPS)):
        with op.batch_alter_table(table) as batch:
            for name, kind, value in columns:
                column = sa.Column(name, kind, nullable=value is None, server_default=value)
                batch.add_column(column)
        with op.batch_alter_table(table) as batch:
            for name, kind, value in columns:
                if value is not None:
                    batch.alter_column(name, existing_type=kind(), server_default=None)
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
        with op.batch_alter_table(table) as batch:
            for name, _, _ in columns:
                batch.drop_column(name)
