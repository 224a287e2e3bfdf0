"""Jobs and groups that have ended stay as they are for workers; rights granted beside ours go.

Revision 0016. PostgreSQL alone. Running workers resume: what they do is what they may. The triggers
of 0014 are made anew, and stay so after the downgrade, which takes the new ones away.
"""

from specbatch.migrations.shared import on_postgres
from specbatch.schemas.sql_triggers import creating, dropping_of_ended

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    on_postgres(creating())


def downgrade() -> None:
    on_postgres(dropping_of_ended())
