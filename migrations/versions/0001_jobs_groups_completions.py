"""Jobs, groups, completions and quarantined rows.

Revision 0001, the first. Spelled out rather than taken from the tables, which will move on.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from specbatch.migrations.shared import first_completions, of_job, where

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("spec", sa.JSON, nullable=False),
        sa.Column("spec_digest", sa.Text, nullable=False),
        sa.Column("verifier", sa.Text, nullable=False),
        sa.Column("proposer", sa.Text),
        sa.Column("output_uri", sa.Text, nullable=False),
        sa.Column("workspace_uri", sa.Text, nullable=False),
        sa.Column("idempotency_key", sa.Text),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("ingest_done", sa.Boolean, nullable=False),
        sa.Column("cursor", sa.JSON),
        sa.Column("next_row", sa.BigInteger, nullable=False),
        sa.Column("groups_total", sa.Integer, nullable=False),
        sa.Column("rows_total", sa.BigInteger, nullable=False),
        sa.Column("rows_rejected", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("report", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double),
        sa.Column("finished_at", sa.Double),
        *_lease(),
        sa.PrimaryKeyConstraint("job_id", name="pk_jobs"),
        sa.UniqueConstraint("idempotency_key", name="uq_jobs_idempotency_key"),
    )
    op.create_table(
        "groups",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("group_index", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("first_stage", sa.Text, nullable=False),
        sa.Column("source", sa.JSON, nullable=False),
        sa.Column("rows", sa.Integer, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("prompts", sa.JSON, nullable=False),
        sa.Column("drafts", sa.JSON),
        sa.Column("results", sa.JSON),
        sa.Column("waited_sec", sa.Double, nullable=False),
        sa.Column("queue_sec", sa.Double, nullable=False),
        sa.Column("compute_sec", sa.Double, nullable=False),
        sa.Column("device_usd", sa.Double, nullable=False),
        sa.Column("completions", sa.Integer, nullable=False),
        sa.Column("rows_failed", sa.Integer, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("proposed", sa.BigInteger, nullable=False),
        sa.Column("accepted", sa.BigInteger, nullable=False),
        sa.Column("verifier_passes", sa.BigInteger, nullable=False),
        sa.Column("cost_usd", sa.Double, nullable=False),
        *_lease(),
        sa.PrimaryKeyConstraint("job_id", "group_index", name="pk_groups"),
        of_job("groups"),
    )
    op.create_table(
        "completions",
        *first_completions(),
        sa.PrimaryKeyConstraint("job_id", "row_index", "sample_index", name="pk_completions"),
        of_job("completions"),
    )
    op.create_table(
        "rejected_rows",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("row_index", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("row_id", sa.Text),
        sa.Column("code", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "row_index", name="pk_rejected_rows"),
        of_job("rejected_rows"),
    )
    claimable_job = sa.text("stage IN ('ingest', 'publish')")
    open_group = sa.text("stage IN ('propose', 'verify', 'record')")
    op.create_index("ix_jobs_created_at", "jobs", ["created_at"])
    op.create_index("ix_jobs_due", "jobs", ["ready_at"], **where(claimable_job))
    op.create_index("ix_groups_due", "groups", ["ready_at"], **where(open_group))
    op.create_index("ix_groups_open", "groups", ["job_id"], **where(open_group))


def downgrade() -> None:
    for table in ("rejected_rows", "completions", "groups", "jobs"):
        op.drop_table(table)


def _lease() -> list[sa.Column[Any]]:
    return [
        sa.Column("stage", sa.Text, nullable=False),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("lease_owner", sa.Text),
        sa.Column("lease_until", sa.Double, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("ready_at", sa.Double, nullable=False),
        sa.Column("last_error", sa.Text),
    ]
