"""Roles have rights on columns, not on whole tables; triggers hold what columns cannot say.

Revision 0014. PostgreSQL alone. Running workers go on: what they do is what they may. Whoever runs
an earlier version's `specbatch migrate` after the downgrade gives the wide rights back.
"""

from specbatch.migrations.shared import on_postgres
from specbatch.schemas.sql_triggers import creating, dropping

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    on_postgres(creating())


def downgrade() -> None:
    on_postgres(dropping())
