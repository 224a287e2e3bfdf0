"""Workers account for all of their time, whoever it was spent on.

Revision 0008. Taking it back loses what was accounted for; what completions cost stays with them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from alembic import op

from specbatch.migrations.shared import add_columns, drop_columns, where

revision = "0008"
down_revision = "0007"

_OPEN = sa.text("ended_at IS NULL")
_KINDS = ("prefill", "verify", "draft", "rejected", "padding", "overhead")
_OF_GROUPS = ("taken_usd", "baseline_usd")


def upgrade() -> None:
    op.create_table(
        "worker_sessions",
        sa.Column("session_id", sa.Text, nullable=False),
        *(sa.Column(n, sa.Text, nullable=False) for n in ("owner", "device_kind", "region")),
        sa.Column("tenure", sa.Text, nullable=False),
        sa.Column("price_microusd", sa.BigInteger, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("beat_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
        *(
            sa.Column(f"{name}_ticks", sa.BigInteger, nullable=False)
            for name in ("seen", "idle", "overhead", "lost")
        ),
        sa.Column("leased_ticks", sa.BigInteger),
        sa.PrimaryKeyConstraint("session_id", name="pk_worker_sessions"),
    )
    op.create_index("ix_worker_sessions_open", "worker_sessions", ["beat_at"], **where(_OPEN))
    op.create_table(
        "time_slices",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("group_index", sa.Integer, nullable=False),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("session_id", sa.Text, nullable=False),
        sa.Column("stage", sa.Text, nullable=False),
        sa.Column("kept", sa.Boolean, nullable=False),
        *(sa.Column(f"{kind}_ticks", sa.BigInteger, nullable=False) for kind in _KINDS),
        sa.PrimaryKeyConstraint(
            "job_id", "group_index", "generation", "session_id", name="pk_time_slices"
        ),
        sa.ForeignKeyConstraint(
            ["session_id"],
            ["worker_sessions.session_id"],
            name="fk_time_slices_session_id_worker_sessions",
        ),
    )
    op.create_index("ix_time_slices_session_id", "time_slices", ["session_id"])
    with _index_put_aside():
        add_columns("groups", [(name, sa.Double, "0") for name in _OF_GROUPS])


def downgrade() -> None:
    with _index_put_aside():
        drop_columns("groups", reversed(_OF_GROUPS))
    op.drop_table("time_slices")
    op.drop_table("worker_sessions")


@contextmanager
def _index_put_aside() -> Iterator[None]:
    """SQLite's tables are made anew to be altered, and their indexes with them: as they were, but
    for the order in which they sort."""
    is_sqlite = op.get_context().dialect.name == "sqlite"
    if is_sqlite:
        op.drop_index("ix_groups_next", "groups")
    yield
    if is_sqlite:
        op.create_index(
            "ix_groups_next",
            "groups",
            ["job_id", "stage", sa.text("prompt_tokens DESC"), "group_index"],
            sqlite_where=sa.text("stage IN ('propose', 'verify', 'record')"),
        )
