"""How a job's texts are kept, its whole spec where the shown one says less, and what was purged.

Revision 0010. On PostgreSQL operators no longer read texts, and a role that purges comes.
"""

import sqlalchemy as sa

from specbatch.migrations.shared import NewColumn, add_columns, drop_columns, on_postgres
from specbatch.schemas.sql_roles import showing_texts

revision = "0010"
down_revision = "0009"

_COLUMNS: tuple[NewColumn, ...] = (
    ("privacy", sa.Text, "full"),
    ("sealed_spec", sa.Text, None),
    ("purged_at", sa.Double, None),
    ("purged_to", sa.BigInteger, None),
)


def upgrade() -> None:
    add_columns("jobs", _COLUMNS)


def downgrade() -> None:
    on_postgres(showing_texts())
    drop_columns("jobs", [name for name, _, _ in reversed(_COLUMNS)])
