"""Where each token of a completion came from, and its share of the device's time.

Revision 0007. `completions` is made anew: in an order of columns without gaps, packed and by month
on PostgreSQL, with the view `token_record` beside it. Of completions that are there nothing more is
known than was: no steps, no drafts, no ticks.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from specbatch.migrations import shared
from specbatch.migrations.shared import array, first_completions, of_job, top_logprobs
from specbatch.schemas import token_record
from specbatch.schemas.sql_roles import granting

revision = "0007"
down_revision = "0006"

_OLD = "completions_before"
_TICKS = (
    *("prefill_ticks", "verify_ticks", "draft_ticks", "rejected_ticks"),
    *("padding_ticks", "overhead_ticks", "ahead_ticks"),
)
_PRICES = ("price_microusd", "ahead_price_microusd")
_SAME = (
    *("row_index", "seed", "cost_usd", "decode_sec", "baseline_sec", "sample_index"),
    *("group_index", "prompt_tokens", "proposed", "accepted", "verifier_passes", "job_id"),
    *("row_id", "tag", "finish_reason", "error", "text", "logprobs"),
    *("top_token_ids", "top_logprobs"),
)

# Of each pass 4 · (tokens - 1) + the origin of its last token; only an accepted one leaves it open.
_PACKED_ORIGINS = """
coalesce((
  SELECT array_agg((4 * (tokens - 1) + last)::smallint ORDER BY pass)
  FROM (
    SELECT pass, count(*) AS tokens, (array_agg(origin ORDER BY n DESC))[1] AS last
    FROM (
      SELECT origin, n, count(*) FILTER (WHERE origin <> 1) OVER (
        ORDER BY n ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
      ) AS pass
      FROM unnest(c.origins) WITH ORDINALITY AS token (origin, n)
    ) AS tokens
    GROUP BY pass
  ) AS passes
), '{}')"""

# Digits of 15 bits; all but the last are negative.
_PACKED_TOKENS = """
coalesce((
  SELECT array_agg(digit::smallint ORDER BY n, place)
  FROM unnest(c.token_ids) WITH ORDINALITY AS token (id, n),
    LATERAL (VALUES (1, -1 - (id >> 15)), (2, id & 32767)) AS digits (place, digit)
  WHERE place = 2 OR id > 32767
), '{}')"""


def upgrade() -> None:
    dialect = op.get_context().dialect.name
    on_postgres = dialect == "postgresql"
    _put_aside()
    op.create_table(
        "completions",
        *_columns(),
        *_constraints("month"),
        postgresql_partition_by="RANGE (month)",
    )
    for statement in token_record.creating(dialect, with_reuse=False):
        op.execute(_literal(statement))
    if on_postgres:
        months = f"SELECT DISTINCT {_MONTH_POSTGRES} AS month FROM jobs AS j"
        op.execute(_literal(f"SELECT specbatch_month(month) FROM ({months}) AS months"))
    filled = {
        **{name: f"c.{name}" for name in _SAME},
        **dict.fromkeys((*_TICKS, *_PRICES), "0"),
        "compute_sec": "c.compute_sec",
        "draft_sec": "c.draft_sec",
        "verifier": "c.verifier",
        "proposer": "coalesce(c.proposer, '')",
        "proposed_at_depth": "c.proposed_at_depth",
        "accepted_at_depth": "c.accepted_at_depth",
        "token_ids": _PACKED_TOKENS if on_postgres else "c.token_ids",
        "origins": _PACKED_ORIGINS if on_postgres else "c.origins",
        "month": _MONTH_POSTGRES if on_postgres else _MONTH_SQLITE,
    }
    _move(filled, _OLD, "completions")
    op.drop_table(_OLD)


def downgrade() -> None:
    """What was packed is unpacked, and what other columns tell is spelled out."""
    dialect = op.get_context().dialect.name
    on_postgres = dialect == "postgresql"
    if on_postgres:
        op.execute("DROP VIEW token_record")
    else:
        for statement in token_record.dropping(dialect):
            op.execute(statement)
    _put_aside()
    op.create_table("completions", *first_completions(), *top_logprobs(), *_constraints())
    none = "'{}'" if on_postgres else "'[]'"
    ticks = " + ".join(f"c.{name}" for name in _TICKS if name != "ahead_ticks")
    filled = {
        **{name: f"c.{name}" for name in _SAME},
        "compute_sec": f"coalesce(c.compute_sec, ({ticks}) / 1e7)",
        "draft_sec": "coalesce(c.draft_sec, c.ahead_ticks / 1e7)",
        "verifier": "coalesce(c.verifier, j.verifier)",
        "proposer": "nullif(coalesce(c.proposer, j.proposer), '')",
        "proposed_at_depth": f"coalesce(c.proposed_at_depth, {none})",
        "accepted_at_depth": f"coalesce(c.accepted_at_depth, {none})",
        "token_ids": "specbatch_numbers(c.token_ids)::integer[]" if on_postgres else "c.token_ids",
        "origins": "specbatch_origins(c.origins)" if on_postgres else "c.origins",
    }
    _move(filled, _OLD, "completions")
    op.drop_table(_OLD)
    for statement in token_record.dropping(dialect):
        op.execute(statement)
    shared.on_postgres(granting())


_MONTH_POSTGRES = "to_char(to_timestamp(j.created_at) AT TIME ZONE 'UTC', 'YYYYMM')::integer"
_MONTH_SQLITE = "CAST(strftime('%Y%m', j.created_at, 'unixepoch') AS INTEGER)"


def _put_aside() -> None:
    op.rename_table("completions", _OLD)
    if op.get_context().dialect.name == "postgresql":  # names of indexes are the schema's
        op.execute(f"ALTER TABLE {_OLD} RENAME CONSTRAINT pk_completions TO pk_{_OLD}")


def _move(filled: dict[str, str], source: str, target: str) -> None:
    op.execute(
        _literal(
            f"INSERT INTO {target} ({', '.join(filled)}) SELECT {', '.join(filled.values())}"
            f" FROM {source} AS c JOIN jobs AS j ON j.job_id = c.job_id"
        )
    )


def _literal(statement: str) -> sa.TextClause:
    """SQL in which a colon is a colon."""
    return sa.text(statement.replace(":", "\\:"))


def _columns() -> list[sa.Column[Any]]:
    smallints = array(sa.SmallInteger)
    return [
        sa.Column("row_index", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("cost_usd", sa.Double, nullable=False),
        sa.Column("decode_sec", sa.Double, nullable=False),
        sa.Column("baseline_sec", sa.Double, nullable=False),
        sa.Column("compute_sec", sa.Double),
        sa.Column("draft_sec", sa.Double),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in (*_TICKS, *_PRICES)),
        sa.Column("month", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("sample_index", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("group_index", sa.Integer, nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("proposed", sa.Integer, nullable=False),
        sa.Column("accepted", sa.Integer, nullable=False),
        sa.Column("verifier_passes", sa.Integer, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("row_id", sa.Text, nullable=False),
        sa.Column("tag", sa.Text),
        sa.Column("finish_reason", sa.Text, nullable=False),
        sa.Column("verifier", sa.Text),
        sa.Column("proposer", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("token_ids", smallints, nullable=False),
        sa.Column("logprobs", array(sa.REAL), nullable=False),
        sa.Column("origins", smallints, nullable=False),
        sa.Column("steps", array(sa.Integer)),
        sa.Column("pass_ticks", smallints),
        sa.Column("makers", smallints),
        sa.Column("drafted", smallints),
        sa.Column("rejected", smallints),
        sa.Column("sources", sa.JSON),
        sa.Column("proposed_at_depth", array(sa.Integer)),
        sa.Column("accepted_at_depth", array(sa.Integer)),
        *top_logprobs(),
    ]


def _constraints(*more: str) -> tuple[sa.Constraint, ...]:
    key = ("job_id", "row_index", "sample_index", *more)
    return (
        sa.PrimaryKeyConstraint(*key, name="pk_completions"),
        of_job("completions"),
    )
