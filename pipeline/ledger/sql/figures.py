"""Figures of a job's groups and completions, a page at a time: what a report adds up."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from sqlalchemy import select

from specbatch.pipeline.ledger.sql.reading import by_row, fetch
from specbatch.pipeline.ledger.sql.transactions import Transactions
from specbatch.schemas import completion_rows
from specbatch.schemas.job_figures import GroupFigures, RowFigures
from specbatch.schemas.records import Stage
from specbatch.schemas.tables import Completion, Group

_PAGE = 2000
_GROUP = (
    *("group_index", "stage", "rows", "ready_at", "queue_sec", "compute_sec", "completions"),
    *("completion_tokens", "proposed", "accepted", "verifier_passes", "cost_usd"),
)
_ROW = (
    *("row_index", "sample_index", "group_index", "tag", "finish_reason", "prompt_tokens"),
    *("proposed", "accepted", "verifier_passes", "cost_usd", "prefill_ticks", "verify_ticks"),
    *("draft_ticks", "rejected_ticks", "padding_ticks", "overhead_ticks"),
    *("origins", "steps", "sources", "makers", "drafted"),
)


def of_groups(database: Transactions, job_id: str) -> Iterator[GroupFigures]:
    query = (
        select(*(getattr(Group, name) for name in _GROUP))
        .where(Group.job_id == job_id)
        .order_by(Group.group_index)
        .limit(_PAGE)
    )
    after = -1
    while True:
        rows = database.read(partial(fetch, query.where(Group.group_index > after)))
        yield from map(_group, rows)
        if len(rows) < _PAGE:
            return
        after = rows[-1].group_index


def of_rows(database: Transactions, job_id: str, batch: int) -> Iterator[RowFigures]:
    query = select(*(getattr(Completion, name) for name in _ROW)).where(Completion.job_id == job_id)
    yield from map(completion_rows.row_figures, by_row(database, query, batch))


def _group(row: Any) -> GroupFigures:
    stage = Stage(row.stage)
    return GroupFigures(
        index=row.group_index,
        stage=stage,
        rows=row.rows,
        done_at=row.ready_at if stage is Stage.DONE else None,
        queue_sec=row.queue_sec,
        compute_sec=row.compute_sec,
        completions=row.completions,
        completion_tokens=row.completion_tokens,
        proposed=row.proposed,
        accepted=row.accepted,
        verifier_passes=row.verifier_passes,
        cost_usd=row.cost_usd,
    )
