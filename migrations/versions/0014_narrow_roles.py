"""Roles have rights on columns, not on whole tables; triggers hold what columns cannot say.

Revision 0014. PostgreSQL alone. Running workers go on: what they do is what they may. Whoever runs
an earlier version's `specbatch migrate` after the downgrade gives the wide rights back.
"""

from alembic import op

from specbatch.schemas.sql_roles import granting
from specbatch.schemas.sql_triggers import creating, dropping

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        for statement in (*creating(), *granting()):
            op.execute(statement)


def downgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        for statement in dropping():
            op.execute(statement)
