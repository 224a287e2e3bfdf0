"""Files, batches and API keys of `specbatch serve`; budgets of tenants; pools of workers.

Revision 0028. Taking it back drops them; jobs stay.

The most tokens of a group that is there follow from its job's spec. A row with a larger
`max_tokens` of its own may take more: such rows of jobs that were read before may exceed a budget.

Tenants' shares are counted in device seconds instead of tokens from here on, so all begin alike.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from alembic import op

from specbatch.migrations.shared import add_columns, drop_columns, where

revision = "0028"
down_revision = "0027"

DEFAULT_POOL = "default"
_OF_PROCESSES = (("region", sa.Text, None), ("is_spot", sa.Boolean, sa.false()))
_OF_SESSIONS = (("pool", sa.Text, DEFAULT_POOL), ("each_microusd", sa.BigInteger, None))
_OF_GROUPS = ("most_tokens", "most_row_tokens", "reserved_tokens")
_OF_TENANTS = ("credit", "sec_per_token")


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
    op.create_index("ix_batches_tenant_open", "batches", ["tenant"], **is_open)
    op.create_table(
        "api_keys",
        *_text("key_id", "name", "tenant", "scopes"),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        *_time("created_at", nullable=False),
        *_time("expires_at", "revoked_at"),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
    )
    _add_budgets()
    add_columns("worker_sessions", _OF_SESSIONS)
    add_columns("worker_processes", _OF_PROCESSES)


def _add_budgets() -> None:
    op.create_table(
        "tenant_budgets",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        *_text("tenant", "period"),
        sa.Column("tokens", sa.BigInteger(), nullable=True),
        *_time("usd"),
        *_time("set_at", nullable=False),
        *_text("set_by", "reason"),
        *_time("ended_at"),
        *_text("ended_by", "end_reason", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_tenant_budgets"),
    )
    active = where(sa.text("ended_at IS NULL"))
    columns = ["tenant", "period"]
    op.create_index("uq_tenant_budgets_active", "tenant_budgets", columns, unique=True, **active)
    op.create_table(
        "tenant_spending",
        *_text("tenant"),
        sa.Column("day", sa.Integer(), autoincrement=False, nullable=False),
        *_number("tokens"),
        *_time("usd", nullable=False),
        sa.PrimaryKeyConstraint("tenant", "day", name="pk_tenant_spending"),
    )
    with _next_group_index():
        counts = [(name, sa.BigInteger, "0") for name in _OF_GROUPS]
        add_columns("groups", [*counts, ("charged_sec", sa.Double, "0")])
    _estimate_bounds()
    op.execute("DELETE FROM tenants")
    add_columns("tenants", [(name, sa.Double, "0") for name in _OF_TENANTS])


@contextmanager
def _next_group_index() -> Iterator[None]:
    """SQLite copies the table, and Alembic would make this index without its descending order."""
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


def _estimate_bounds() -> None:
    """Of groups that are there: as if each row had the job's own `max_tokens` and `n`."""
    jobs = sa.table("jobs", sa.column("job_id"), sa.column("spec", sa.JSON))
    names = ("job_id", "rows", "prompt_tokens", *_OF_GROUPS)
    groups = sa.table("groups", *map(sa.column, names))
    connection = op.get_bind()
    for job_id, spec in connection.execute(sa.select(jobs.c.job_id, jobs.c.spec)).all():
        sampling = spec.get("sampling") or {}
        longer = ((spec.get("output") or {}).get("malformed") or {}).get("max_tokens") or 0
        most = max(sampling.get("max_tokens") or 128, longer)
        bound = (groups.c.prompt_tokens + groups.c.rows * most) * (sampling.get("n") or 1)
        values = dict.fromkeys(_OF_GROUPS, bound)
        connection.execute(sa.update(groups).where(groups.c.job_id == job_id).values(**values))


def downgrade() -> None:
    drop_columns("worker_processes", [name for name, _, _ in _OF_PROCESSES])
    drop_columns("worker_sessions", [name for name, _, _ in _OF_SESSIONS])
    with _next_group_index():
        drop_columns("groups", [*_OF_GROUPS, "charged_sec"])
    op.execute("DELETE FROM tenants")
    drop_columns("tenants", _OF_TENANTS)
    for table in ("tenant_spending", "tenant_budgets"):
        op.drop_table(table)
    for table in ("api_keys", "batches", "files"):
        op.drop_table(table)
