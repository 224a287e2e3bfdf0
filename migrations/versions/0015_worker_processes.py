"""Worker processes: what each does, and whether it can take messages from the broker.

Revision 0015. Rows come with the next start of each worker.
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.create_table(
        "worker_processes",
        sa.Column("process_id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("kinds", sa.Text(), nullable=False),
        sa.Column("verifier", sa.Text(), nullable=True),
        sa.Column("proposer", sa.Text(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("heard_at", sa.Double(), nullable=False),
        sa.Column("trouble", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("process_id", name="pk_worker_processes"),
    )


def downgrade() -> None:
    op.drop_table("worker_processes")
