"""Files, batches and API keys of `specbatch serve`.

Revision 0028. Taking it back drops them; jobs stay.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from specbatch.migrations.shared import on_postgres, where
from specbatch.schemas.sql_roles import granting

revision = "0028"
down_revision = "0027"


def _text(*names: str, nullable: bool = False) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.Text(), nullable=nullable) for name in names]


def _time(*names: str, nullable: bool = True) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.Double(), nullable=nullable) for name in names]


def _number(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.BigInteger(), nullable=False) for name in names]


def upgrade() -> None:
    op.create_table(
        "files",
        *_text("file_id", "tenant", "purpose", "filename"),
        *_number("size_bytes"),
        *_text("sha256", "service_id"),
        *_time("created_at", nullable=False),
        sa.PrimaryKeyConstraint("file_id", name="pk_files"),
    )
    op.create_index("ix_files_tenant", "files", ["tenant", "file_id"])
    op.create_table(
        "batches",
        *_text("batch_id", "tenant", "endpoint", "input_file_id", "completion_window"),
        *_text("idempotency_key", nullable=True),
        *_text("digest", "service_id"),
        *_text("client_metadata", nullable=True),
        *_text("phase"),
        *_text("model", "job_id", "waits_because", "status", "errors", nullable=True),
        *_number("requests", "completed", "failed"),
        *_text("output_file_id", "error_file_id", nullable=True),
        *_time("created_at", "expires_at", nullable=False),
        *_time("in_progress_at", "cancelling_at", "finalizing_at", "ended_at"),
        sa.PrimaryKeyConstraint("batch_id", name="pk_batches"),
    )
    op.create_index("ix_batches_tenant", "batches", ["tenant", "batch_id"])
    op.create_index("uq_batches_key", "batches", ["tenant", "idempotency_key"], unique=True)
    is_open = where(sa.text("phase <> 'ended'"))
    op.create_index("ix_batches_open", "batches", ["service_id", "batch_id"], **is_open)
    op.create_table(
        "api_keys",
        *_text("key_id", "name", "tenant", "scopes"),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        *_time("created_at", nullable=False),
        *_time("expires_at", "revoked_at"),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
    )
    on_postgres(granting())


def downgrade() -> None:
    for table in ("api_keys", "batches", "files"):
        op.drop_table(table)
