"""What is learned of drafts is learned of a model, and not of its name.

Revision 0018. Records of blocks and draft models that are there are of no known model: they stay,
and no model inherits them.
"""

from collections.abc import Iterable

import sqlalchemy as sa
from alembic import op

from specbatch.migrations.shared import drop_columns

revision = "0018"
down_revision = "0017"

_TABLE = "acceptance_priors"
_KEY = ("tenant", "job_name", "proposer", "tag")


def upgrade() -> None:
    with op.batch_alter_table(_TABLE) as table:
        table.add_column(sa.Column("fingerprint", sa.Text, nullable=False, server_default=""))
        table.add_column(sa.Column("learned_at", sa.Double, nullable=False, server_default="0"))
    _rekey([*_KEY[:3], "fingerprint", "tag"])
    with op.batch_alter_table(_TABLE) as table:
        table.alter_column("fingerprint", existing_type=sa.Text(), server_default=None)
        table.alter_column("learned_at", existing_type=sa.Double(), server_default=None)


def downgrade() -> None:
    op.execute("DELETE FROM acceptance_priors WHERE fingerprint <> ''")
    _rekey(_KEY)
    drop_columns(_TABLE, ["fingerprint", "learned_at"])


def _rekey(columns: Iterable[str]) -> None:
    with op.batch_alter_table(_TABLE) as table:
        table.drop_constraint("pk_acceptance_priors", type_="primary")
        table.create_primary_key("pk_acceptance_priors", list(columns))
