"""Where each token of a completion came from, and its share of the device's time.

Revision 0007. Of completions that are there nothing is known: no passes, no time.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_KINDS = ("prefill", "verify", "draft", "rejected", "padding", "overhead")
_NUMBERS = (
    *(f"{kind}_ticks" for kind in _KINDS),
    *("price_microusd", "ahead_ticks", "ahead_price_microusd"),
)


def upgrade() -> None:
    with op.batch_alter_table("completions") as batch:
        for name, kind in _lists().items():
            batch.add_column(sa.Column(name, kind))
        for name in _NUMBERS:
            batch.add_column(sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
    with op.batch_alter_table("completions") as batch:
        for name in _NUMBERS:
            batch.alter_column(name, existing_type=sa.BigInteger(), server_default=None)


def downgrade() -> None:
    with op.batch_alter_table("completions") as batch:
        for name in (*_lists(), *_NUMBERS):
            batch.drop_column(name)


def _lists() -> dict[str, sa.types.TypeEngine[Any]]:
    return {
        "steps": _array(sa.Integer),
        "pass_ticks": _array(sa.Integer),
        "sources": sa.JSON(),
        "makers": _array(sa.SmallInteger),
        "drafted": _array(sa.SmallInteger),
        "rejected": _array(sa.Integer),
    }


def _array(item: type[sa.types.TypeEngine[Any]]) -> sa.types.TypeEngine[Any]:
    return sa.JSON().with_variant(ARRAY(item), "postgresql")
