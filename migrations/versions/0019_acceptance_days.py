"""Acceptance by day, in which slow falls are found.

Revision 0019. It fills from the next group on; taking it back loses the days, and nothing else.
"""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    op.create_table(
        "acceptance_days",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("job_name", sa.Text(), nullable=False),
        sa.Column("proposer", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.Column("day", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("agreed", sa.Double(), nullable=False),
        sa.Column("tested", sa.Double(), nullable=False),
        sa.Column("superseded", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint(
            *("tenant", "job_name", "proposer", "fingerprint", "tag", "day"),
            name="pk_acceptance_days",
        ),
    )
    op.create_index("ix_acceptance_days_day", "acceptance_days", ["day"])


def downgrade() -> None:
    op.drop_table("acceptance_days")
