"""Completions that are copied into PostgreSQL, beside the same ones inserted by SQLAlchemy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from sqlalchemy import Column, MetaData, Table, insert, select

from specbatch.pipeline.ledger.sql import copying
from specbatch.pipeline.ledger.sql.transactions import Transactions
from specbatch.schemas.errors import StoreError
from specbatch.schemas.mapper import as_float32
from specbatch.schemas.tables import Completion

_SKIPPED = "month"  # its job's; it is added when the rows are moved
COLUMNS = [column for column in Completion.__table__.columns if column.name != _SKIPPED]
STAGED = Table(copying._STAGING, MetaData(), *(Column(c.name, c.type) for c in COLUMNS))

INT8, INT4 = 2**63 - 1, 2**31 - 1
LARGEST, SMALLEST = 3.4028234663852886e38, 1.401298464324817e-45  # of single precision
TEXT = "nul \x00, tab\t, new\n, \\N, \x1a0000, \ud800 alone, 🙂 é, {,}\"'"
SINGLE = (0.0, -0.0, LARGEST, -LARGEST, SMALLEST, -math.inf, math.inf)
FULL: dict[str, Any] = {
    **dict.fromkeys(("row_index", "seed", "prefill_ticks", "verify_ticks"), INT8),
    **dict.fromkeys(("draft_ticks", "rejected_ticks", "padding_ticks"), -INT8 - 1),
    **dict.fromkeys(("overhead_ticks", "ahead_ticks", "price_microusd"), INT8),
    "ahead_price_microusd": 0,
    **dict.fromkeys(("sample_index", "group_index", "prompt_tokens"), INT4),
    **dict.fromkeys(("proposed", "accepted"), -INT4 - 1),
    "verifier_passes": 0,
    "cost_usd": 1.7976931348623157e308,
    "decode_sec": 5e-324,
    "baseline_sec": -0.0,
    "compute_sec": math.inf,
    "draft_sec": -math.inf,
    "score": -1.7976931348623157e308,
    **dict.fromkeys(("job_id", "finish_reason", "verifier", "proposer"), "🙂 é\t\\N"),
    **dict.fromkeys(("numeric_class", "model_fingerprint", "reused_from"), ""),
    **dict.fromkeys(("row_id", "tag", "error", "text"), TEXT),
    "token_ids": (0, -1, 32_767, 32_768, INT4),
    "logprobs": SINGLE,
    "origins": (0, 1, 2, *(1,) * 8_190, 2, 1),
    "steps": (0, 1, INT4),
    "pass_ticks": (0, 32_767, 2**62),
    "makers": (32_767, 0, *(5,) * 40_000),
    "drafted": (1,),
    "rejected": (-1, INT4),
    "sources": ["ngram", TEXT.replace("\ud800", "").replace("\x00", "")],
    "proposed_at_depth": (-INT4 - 1, INT4),
    "accepted_at_depth": (0,),
    "top_token_ids": (INT4, 0),
    "top_logprobs": SINGLE,
    "digest": bytes(range(256)),
    "receipt": b"",
}
EMPTY = {
    column.name: ()
    if hasattr(column.type, "packed")
    else None
    if column.nullable
    else FULL[column.name]
    for column in COLUMNS
}
NULLS = {column.name: None if column.nullable else FULL[column.name] for column in COLUMNS}


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    """The values to the bit: with the signs of zeros, and arrays in single precision."""
    single = ("logprobs", "top_logprobs")
    values = {name: as_float32(row[name]) for name in single if row[name] is not None}
    return {name: repr(value) for name, value in {**row, **values}.items()}


@pytest.fixture
def database(postgres_url: str) -> Iterator[Transactions]:
    opened = Transactions(postgres_url)
    yield opened
    opened.close()


def test_every_column_is_named_here() -> None:
    assert FULL.keys() == {column.name for column in COLUMNS}


def test_what_is_copied_is_read_back_as_what_is_inserted(database: Transactions) -> None:
    rows = [FULL, EMPTY, NULLS]

    def read(conn: Any) -> tuple[list[Any], list[Any]]:
        copying.stage(conn, rows)
        copied = conn.execute(select(STAGED)).mappings().all()
        conn.execute(STAGED.delete())
        for row in rows:
            conn.execute(insert(STAGED).values(**row))
        return copied, conn.execute(select(STAGED)).mappings().all()

    copied, inserted = database.write(read)
    for row, one, other in zip(rows, copied, inserted, strict=True):
        assert shown(one) == shown(row)
        assert shown(one) == shown(other)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("seed", INT8 + 1),
        ("prompt_tokens", INT4 + 1),
        ("accepted", -INT4 - 2),
        ("makers", (32_768,)),
        ("steps", (INT4 + 1,)),
        ("top_token_ids", (INT4 + 1,)),
    ],
)
def test_a_number_too_large_for_its_column_is_refused(
    database: Transactions, column: str, value: Any
) -> None:
    with pytest.raises(StoreError, match="refused: a number is too large for its column"):
        database.write(lambda conn: copying.stage(conn, [{**FULL, column: value}]))
    database.write(lambda conn: copying.stage(conn, [FULL]))
