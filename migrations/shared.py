"""What several migrations share. It stays as it is: what a migration has done does not change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY

# (name, type, what rows that are there get; None: nothing)
NewColumn = tuple[str, Any, Any]


def add_columns(table: str, columns: Iterable[NewColumn]) -> None:
    """Values stay as defaults: workers of the version before still run, and insert rows without."""
    with op.batch_alter_table(table) as batch:
        for name, kind, value in columns:
            batch.add_column(sa.Column(name, kind, nullable=value is None, server_default=value))


def add_columns_without_defaults(table: str, columns: Iterable[NewColumn]) -> None:
    """As it was done up to 0005."""
    add_columns(table, columns)
    with op.batch_alter_table(table) as batch:
        for name, kind, value in columns:
            if value is not None:
                batch.alter_column(name, existing_type=kind(), server_default=None)


def drop_columns(table: str, names: Iterable[str]) -> None:
    with op.batch_alter_table(table) as batch:
        for name in names:
            batch.drop_column(name)


def on_postgres(statements: Iterable[str]) -> None:
    """Run these where the database is PostgreSQL."""
    if op.get_context().dialect.name == "postgresql":
        for statement in statements:
            op.execute(statement)


def array(item: type[sa.types.TypeEngine[Any]]) -> sa.types.TypeEngine[Any]:
    return sa.JSON().with_variant(ARRAY(item), "postgresql")


def where(condition: sa.TextClause) -> dict[str, Any]:
    """Of a partial index."""
    return {"sqlite_where": condition, "postgresql_where": condition}


def of_job(table: str) -> sa.ForeignKeyConstraint:
    name = f"fk_{table}_job_id_jobs"
    return sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=name, ondelete="CASCADE")


def first_completions() -> list[sa.Column[Any]]:
    """The columns of completions up to 0007, but for those of 0002."""
    return [
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("row_index", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("sample_index", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("group_index", sa.Integer, nullable=False),
        sa.Column("row_id", sa.Text, nullable=False),
        sa.Column("tag", sa.Text),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("token_ids", array(sa.Integer), nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("finish_reason", sa.Text, nullable=False),
        sa.Column("origins", array(sa.SmallInteger), nullable=False),
        sa.Column("logprobs", array(sa.REAL), nullable=False),
        sa.Column("proposed", sa.Integer, nullable=False),
        sa.Column("accepted", sa.Integer, nullable=False),
        sa.Column("verifier_passes", sa.Integer, nullable=False),
        sa.Column("cost_usd", sa.Double, nullable=False),
        sa.Column("verifier", sa.Text, nullable=False),
        sa.Column("proposer", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("proposed_at_depth", array(sa.Integer), nullable=False),
        sa.Column("accepted_at_depth", array(sa.Integer), nullable=False),
        sa.Column("compute_sec", sa.Double, nullable=False),
        sa.Column("draft_sec", sa.Double, nullable=False),
        sa.Column("decode_sec", sa.Double, nullable=False),
        sa.Column("baseline_sec", sa.Double, nullable=False),
    ]


def top_logprobs() -> list[sa.Column[Any]]:
    """The columns of 0002."""
    return [
        sa.Column("top_token_ids", array(sa.Integer)),
        sa.Column("top_logprobs", array(sa.REAL)),
    ]
