"""Figures of a job's groups and completions, with one test body for both databases."""

from __future__ import annotations

from contracts.shorthand import commit, finish, ingest, verified
from ledger.builders import JOB, START, Clock, completion

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.job_figures import GroupFigures, RowFigures
from specbatch.schemas.records import FinishReason, Stage, StageTiming


def test_a_group_tells_its_totals_and_when_it_was_done(store: Store, clock: Clock) -> None:
    ingest(store, groups=2)
    clock.advance(3)
    lease = verified(store, 1)
    clock.advance(4)
    store.commit_group(lease, [completion(4), completion(5)], StageTiming(0.5), {})
    first, second = store.group_figures(JOB)
    assert first == GroupFigures(0, Stage.VERIFY, 4, None, 0.0, 0.0, 0, 0, 0, 0, 0, 0.0)
    assert second == GroupFigures(1, Stage.DONE, 4, START + 7, 3.0, 0.5, 2, 6, 8, 2, 4, 0.5)
    assert list(store.group_figures("nobody's")) == []


def test_a_completion_tells_its_passes_and_no_text(store: Store) -> None:
    ingest(store, groups=2)
    for index in (1, 0):
        commit(store, verified(store, index))
    rows = list(store.row_figures(JOB, batch=3))
    assert [(row.row_index, row.group_index) for row in rows] == [(i, i // 4) for i in range(8)]
    assert rows[5] == RowFigures(
        5, 0, 1, "news", FinishReason.STOP, 5, 4, 1, 2, 0.25,
        3 + 40_000 + 50 + 17 + 2**33, (0, 1, 2), (5, 9), ("ngram", "draft-model"), (1,), (2,),
    )  # fmt: skip
    assert rows[5].tokens == 3
    assert list(store.row_figures("nobody's")) == []


def test_a_purge_leaves_the_figures(store: Store) -> None:
    ingest(store, groups=1)
    commit(store, verified(store, 0))
    finish(store)
    before = list(store.row_figures(JOB))
    assert before
    list(store.purge(JOB, "by a test"))
    assert list(store.row_figures(JOB)) == before
