"""How a job's texts are kept, its whole spec where the shown one says less, and what was purged.

Revision 0010. On PostgreSQL operators no longer read texts, and a role that purges comes.
"""

import sqlalchemy as sa
from alembic import op

from specbatch.schemas.sql_roles import granting, showing_texts

revision = "0010"
down_revision = "0009"

_COLUMNS = (("sealed_spec", sa.Text), ("purged_at", sa.Double), ("purged_to", sa.BigInteger))


def upgrade() -> None:
    with op.batch_alter_table("jobs") as batch:
        batch.add_column(sa.Column("privacy", sa.Text, nullable=False, server_default="full"))
        for name, kind in _COLUMNS:
            batch.add_column(sa.Column(name, kind))
    with op.batch_alter_table("jobs") as batch:
        batch.alter_column("privacy", existing_type=sa.Text(), server_default=None)
    if op.get_context().dialect.name == "postgresql":
        for statement in granting():
            op.execute(statement)


def downgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        for statement in showing_texts():
            op.execute(statement)
    with op.batch_alter_table("jobs") as batch:
        for name in ("purged_to", "purged_at", "sealed_spec", "privacy"):
            batch.drop_column(name)
