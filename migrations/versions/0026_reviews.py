"""The audit log takes decisions of reviewers, and the revisions that publish them.

Revision 0026.
"""

from specbatch.migrations.shared import on_postgres
from specbatch.schemas.sql_triggers import creating

revision = "0026"
down_revision = "0025"


def upgrade() -> None:
    on_postgres(creating())


def downgrade() -> None:
    """Earlier versions do not write such entries, and do not mind that they may be written."""
