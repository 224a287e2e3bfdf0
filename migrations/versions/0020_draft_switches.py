"""Switches by which an operator turns drafting off while jobs run.

Revision 0020. Taking it back drops decisions about switches: earlier versions cannot read them.
"""

import sqlalchemy as sa
from alembic import op

from specbatch.migrations.shared import where

revision = "0020"
down_revision = "0019"

_SCOPE = ("tenant", "job_name", "tag", "proposer")


def upgrade() -> None:
    op.create_table(
        "draft_switches",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in _SCOPE),
        sa.Column("off_at", sa.Double(), nullable=False),
        sa.Column("off_by", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("on_at", sa.Double(), nullable=True),
        sa.Column("on_by", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_draft_switches"),
    )
    active = where(sa.text("on_at IS NULL"))
    op.create_index("uq_draft_switches_off", "draft_switches", [*_SCOPE], unique=True, **active)


def downgrade() -> None:
    op.execute("DELETE FROM decisions WHERE action IN ('switched off', 'switched on')")
    op.drop_table("draft_switches")
