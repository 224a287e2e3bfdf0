"""Where a tenant's last claim began, what a stopped job keeps and spends, and a paused input.

Revision 0005. The index that finds a job's longest group also tells whether it has open ones.
"""

import sqlalchemy as sa
from alembic import op

from specbatch.migrations.shared import add_columns_without_defaults, drop_columns, where

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
        add_columns_without_defaults(table, [(name, kind, value)])
    op.drop_index("ix_groups_open", "groups")
    op.create_index(
        "ix_groups_next",
        "groups",
        ["job_id", "stage", sa.text("prompt_tokens DESC"), "group_index"],
        **where(_OPEN),
    )
    op.create_index("ix_jobs_live", "jobs", ["priority"], **where(_LIVE))


def downgrade() -> None:
    op.drop_index("ix_jobs_live", "jobs")
    op.drop_index("ix_groups_next", "groups")
    op.create_index("ix_groups_open", "groups", ["job_id"], **where(_OPEN))
    for table, name, _, _ in reversed(_COLUMNS):
        drop_columns(table, [name])
