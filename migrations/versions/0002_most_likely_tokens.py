"""The most likely tokens at every token of a completion, where the request asked for them.

Revision 0002. Completions from before have NULL: nobody asked.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    with op.batch_alter_table("completions") as table:
        table.add_column(sa.Column("top_token_ids", _array(sa.Integer)))
        table.add_column(sa.Column("top_logprobs", _array(sa.REAL)))


def downgrade() -> None:
    with op.batch_alter_table("completions") as table:
        table.drop_column("top_logprobs")
        table.drop_column("top_token_ids")


def _array(item: type[sa.types.TypeEngine[Any]]) -> sa.types.TypeEngine[Any]:
    return sa.JSON().with_variant(ARRAY(item), "postgresql")
