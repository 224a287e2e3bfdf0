"""Where a tenant's last claim began, what a stopped job keeps and spends, and a paused input.

Revision 0005. The index that finds a job's longest group also tells whether it has open ones.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_OPEN = sa.text("stage IN ('propose', 'verify', 'record')")
_LIVE = sa.text("stage IN ('ingest', 'run')")

# (table, name, type, what rows that are there get; None: nothing)
_COLUMNS = (
    ("jobs", "ingest_resumes_at", sa.Integer, None),
    ("groups", "rows_kept", sa.Integer, "0"),
    ("groups", "in_flight_usd", sa.Double, "0"),
    ("tenants", "started", sa.Double, "0"),
)


def upgrade() -> None:
    for table, name, kind, value in _COLUMNS:
        with op.batch_alter_table(table) as batch:
            batch.add_column(sa.Column(name, kind, nullable=value is None, server_default=value))
        if value is not None:
            with op.batch_alter_table(table) as batch:
                batch.alter_column(name, existing_type=kind(), server_default=None)
    op.drop_index("ix_groups_open", "groups")
    op.create_index(
        "ix_groups_next",
        "groups",
        ["job_id", "stage", sa.text("prompt_tokens DESC"), "group_index"],
        **_where(_OPEN),
    )
    op.create_index("ix_jobs_live", "jobs", ["priority"], **_where(_LIVE))


def downgrade() -> None:
    op.drop_index("ix_jobs_live", "jobs")
    op.drop_index("ix_groups_next", "groups")
    op.create_index("ix_groups_open", "groups", ["job_id"], **_where(_OPEN))
    for table, name, _, _ in reversed(_COLUMNS):
        with op.batch_alter_table(table) as batch:
            batch.drop_column(name)


def _where(condition: sa.TextClause) -> dict[str, Any]:
    return {"sqlite_where": condition, "postgresql_where": condition}
