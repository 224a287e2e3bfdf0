"""The view `token_record` and the exported tokens were written by different hands. They agree."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from contracts.shorthand import ingest, verified
from ledger.builders import JOB, NO_TIME, completion
from sqlalchemy import text

from specbatch.pipeline.ledger.sql.databases import make_engine
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.outputs.export_columns import token_batch
from specbatch.schemas.export_arrow import TOKENS
from specbatch.schemas.provenance import NO_PROVENANCE, NO_TICKS
from specbatch.schemas.records import CompletionRecord, FinishReason
from support.traced import traced

ROWS = 60


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    opened = open_store(url)
    yield opened
    opened.close()


def records() -> Iterator[CompletionRecord]:
    """Short and long ones, two samples a row; some that know less of themselves."""
    draw = random.Random(29)
    for row in range(ROWS):
        for sample in (0, 1):
            yield traced(draw, row, sample, passes=draw.choice([1, 2, 6, 40]))[0]
    some = traced(draw, ROWS)[0]
    slow = replace(some.provenance, pass_ticks=tuple(range(2**33, 2**33 + 6)))
    yield replace(some, provenance=slow, ticks=replace(some.ticks, verify=2**36))
    gone = replace(some.provenance, rejected=())
    emptied: dict[str, Any] = {"token_ids": (), "logprobs": (), "text": "", "provenance": gone}
    yield replace(some, row_index=ROWS + 3, **emptied)
    bare: dict[str, Any] = {"provenance": NO_PROVENANCE, "ticks": NO_TICKS}
    yield replace(some, row_index=ROWS + 1, **bare)
    yield completion(
        ROWS + 2, token_ids=(), origins=(), logprobs=(), top_logprobs=None,
        finish_reason=FinishReason.ERROR, **bare,
    )  # fmt: skip


def in_view(url: str) -> list[dict[str, Any]]:
    engine = make_engine(url)
    order = "ORDER BY row_index, sample_index, position"
    with engine.connect() as conn:
        found = conn.execute(text(f"SELECT * FROM token_record WHERE job_id = '{JOB}' {order}"))
        rows = [dict(row) for row in found.mappings()]
    engine.dispose()
    return rows


def test_every_token_is_the_same_in_both(store: SqlStore, url: str) -> None:
    kept = sorted(records(), key=lambda record: (record.row_index, record.sample_index))
    ingest(store, groups=1, rows=ROWS + 4)
    store.commit_group(verified(store, 0), kept, NO_TIME, {})
    exported = token_batch(JOB, list(store.completions(JOB))).to_pylist()
    assert exported == token_batch(JOB, kept).to_pylist()
    viewed = in_view(url)
    assert list(viewed[0]) == TOKENS.names
    assert len(viewed) == len(exported) > 1000
    for of_view, of_export in zip(viewed, exported, strict=True):
        assert of_view == of_export
