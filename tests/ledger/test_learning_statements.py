"""What drafting taught, in SQL: how many statements it takes, and what goes with a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ledger.builders import (
    JOB,
    LEASE_SEC,
    NO_TIME,
    RESULTS,
    completion,
    new_group,
    new_job,
    position,
)
from sqlalchemy import event, text

from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.records import Lease, Stage
from specbatch.schemas.speculation import VOCABULARY, AcceptanceCount, Decision, DecisionAction
from support.databases import migrated

DECISION = Decision(1.0, DecisionAction.OFF, "*", "nothing was gained")


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlStore]:
    """A store that goes by its own clock."""
    if request.param == "sqlite":
        url = migrated(tmp_path / "store.db")
    else:
        url = request.getfixturevalue("postgres_url")
    opened = open_store(url)
    opened.create_job(new_job())
    yield opened
    opened.close()


@pytest.fixture
def statements(store: SqlStore) -> list[str]:
    """What is sent to the database from here on."""
    sent: list[str] = []

    def note(_conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if not statement.startswith("BEGIN"):
            sent.append(statement)

    event.listen(store._db._reader, "before_cursor_execute", note)
    return sent


def add_groups(store: SqlStore, groups: int, first_stage: Stage) -> None:
    work = store.claim_job(JOB, Stage.INGEST, "i", LEASE_SEC)
    assert work is not None
    planned = [new_group(index, first_stage=first_stage) for index in range(groups)]
    store.add_groups(work.lease, planned, [], groups * 4, position())
    store.finish_ingest(work.lease, groups * 4, {VOCABULARY: "v1"})


def claim(store: SqlStore, stage: Stage) -> Lease:
    work = store.claim_group(JOB, 0, stage, "w", LEASE_SEC)
    assert work is not None
    return work.lease


def test_nothing_to_keep_takes_no_statement(store: SqlStore, statements: list[str]) -> None:
    store.note_decisions(JOB, [])
    store.learn_acceptance("default", "nightly", [])
    store.learn_acceptance("default", "nightly", [AcceptanceCount("ngram", None, 0.0, 0.0)])
    assert statements == []


def test_all_decisions_take_one_statement_and_all_counts_two(
    store: SqlStore, statements: list[str]
) -> None:
    store.note_decisions(JOB, [DECISION] * 3)
    store.keep_knowledge("cpu", {})
    counts = [AcceptanceCount("ngram", tag, 1.0, 2.0) for tag in (None, "news")]
    store.learn_acceptance("default", "nightly", counts)
    assert [statement.split()[0] for statement in statements] == ["INSERT"] * 4
    assert store.decisions(JOB) == [DECISION] * 3
    assert store.acceptance("default", "nightly") == counts


def test_groups_are_skipped_in_one_statement_by_the_stores_own_clock(
    store: SqlStore, statements: list[str]
) -> None:
    add_groups(store, 3, Stage.PROPOSE)
    statements.clear()
    assert store.skip_proposals(3600.0) == []
    assert store.skip_proposals(0.0) == [(JOB, 0), (JOB, 1), (JOB, 2)]
    assert [statement.split()[0] for statement in statements] == ["UPDATE"] * 2


def test_no_more_past_outputs_are_read_than_are_taken(
    store: SqlStore, statements: list[str]
) -> None:
    add_groups(store, 1, Stage.VERIFY)
    store.advance(claim(store, Stage.VERIFY), Stage.RECORD, RESULTS, NO_TIME)
    records = [completion(row) for row in range(500)]
    store.commit_group(claim(store, Stage.RECORD), records, NO_TIME, {})
    statements.clear()
    outputs = store.past_outputs("default", "nightly", "v1", 10**9, "")
    assert statements == []
    next(outputs)
    assert len(statements) == 2  # the jobs, and one page
    assert len(list(outputs)) == 499
    assert len(statements) == 4


def test_decisions_go_with_their_job(store: SqlStore) -> None:
    store.note_decisions(JOB, [DECISION])
    store._db.write(lambda conn: conn.execute(text(f"DELETE FROM jobs WHERE job_id = '{JOB}'")))
    assert store.decisions(JOB) == []
    kept = store._db.read(lambda conn: conn.scalar(text("SELECT count(*) FROM decisions")))
    assert kept == 0
