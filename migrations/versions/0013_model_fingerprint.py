"""Fingerprints of models: which one a job is decided by, and which one a completion was.

Revision 0013. Jobs that are there get the fingerprint `unknown`: any worker may go on with them.
"""

import sqlalchemy as sa
from alembic import op

from specbatch.migrations.shared import drop_columns

revision = "0013"
down_revision = "0012"

_COLUMNS = (
    ("jobs", "model_fingerprint", sa.Text()),
    ("jobs", "model_parts", sa.JSON()),
    ("jobs", "proposer_fingerprint", sa.Text()),
    ("completions", "model_fingerprint", sa.Text()),
)


def upgrade() -> None:
    for table, name, kind in _COLUMNS:
        op.add_column(table, sa.Column(name, kind, nullable=True))
    op.execute("UPDATE jobs SET model_fingerprint = 'unknown'")


def downgrade() -> None:
    for table, name, _ in reversed(_COLUMNS):
        drop_columns(table, [name])
