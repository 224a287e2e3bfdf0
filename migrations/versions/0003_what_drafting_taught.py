"""Decisions about drafting, and what is learned of machines and proposers for the next job.

Revision 0003. Tables of their own: taking them back loses what was learned, and nothing else.
"""

import sqlalchemy as sa
from alembic import op

from specbatch.migrations.shared import of_job

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "decisions",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("proposer", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("acceptance", sa.Double),
        sa.Column("break_even", sa.Double),
        sa.Column("sequences", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_decisions"),
        of_job("decisions"),
    )
    op.create_index("ix_decisions_job_id", "decisions", ["job_id", "at"])
    op.create_table(
        "machine_knowledge",
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("state", sa.JSON, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_machine_knowledge"),
    )
    op.create_table(
        "acceptance_priors",
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("job_name", sa.Text, nullable=False),
        sa.Column("proposer", sa.Text, nullable=False),
        sa.Column("tag", sa.Text, nullable=False),
        sa.Column("agreed", sa.Double, nullable=False),
        sa.Column("tested", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint(
            "tenant", "job_name", "proposer", "tag", name="pk_acceptance_priors"
        ),
    )


def downgrade() -> None:
    for table in ("acceptance_priors", "machine_knowledge", "decisions"):
        op.drop_table(table)
