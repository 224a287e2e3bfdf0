"""What attempts used beside devices, and receipts of completions that prove prompts and outputs
after their texts are gone.

Revision 0024. Jobs from before have neither. Taking it back loses what there is.
"""

import sqlalchemy as sa
from alembic import op

from specbatch.migrations.shared import drop_columns, on_postgres
from specbatch.schemas.sql_triggers import creating

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    op.create_table(
        "stage_usage",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("group_index", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("generation", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column("kept", sa.Boolean(), nullable=False),
        sa.Column("prices", sa.Text(), nullable=False),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in (
                *("cpu_ticks", "store_statements", "object_writes", "object_reads"),
                *("stored_bytes", "sent_bytes", "received_bytes"),
            )
        ),
        sa.PrimaryKeyConstraint("job_id", "group_index", "generation", name="pk_stage_usage"),
    )
    op.add_column("completions", sa.Column("receipt", sa.LargeBinary(), nullable=True))
    on_postgres(creating())


def downgrade() -> None:
    drop_columns("completions", ["receipt"])
    op.drop_table("stage_usage")
