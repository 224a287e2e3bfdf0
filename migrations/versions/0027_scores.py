"""Completions have the score by which the best of a prompt's are published.

Revision 0027. Those from before have none. Taking it back loses the scores, and an audit finds that
completions with a score have changed: the log has digests with it.
"""

import sqlalchemy as sa
from alembic import op

from specbatch.migrations.shared import drop_columns

revision = "0027"
down_revision = "0026"


def upgrade() -> None:
    op.add_column("completions", sa.Column("score", sa.Double(), nullable=True))


def downgrade() -> None:
    drop_columns("completions", ["score"])
