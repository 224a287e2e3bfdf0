"""The claim of whoever is next, in SQL: three statements, each found by an index, however many
groups wait; and processes that claim at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from ledger.builders import (
    LEASE_SEC,
    NO_TIME,
    RESULTS,
    ROW_BOUND,
    completion,
    new_group,
    new_job,
    position,
)
from sqlalchemy import event, text

from specbatch.pipeline.ledger.fair_share import SEC_PER_TOKEN
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.records import Stage
from support import forks

JOBS, GROUPS = 5, 2000


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    opened = open_store(url)
    yield opened
    opened.close()


def plan(store: SqlStore, jobs: int, groups: int) -> None:
    for number in range(jobs):
        job_id = f"job{number:05d}"
        store.create_job(new_job(job_id, tenant=f"tenant-{number % 3}"))
        work = store.claim_job(job_id, Stage.INGEST, "i", LEASE_SEC)
        assert work is not None
        planned = [new_group(index, rows=1 + index % 7) for index in range(groups)]
        store.add_groups(work.lease, planned, [], groups * 4, position())
        store.finish_ingest(work.lease, groups * 4, {})
    if store._db.is_postgres:
        with store._db._reader.begin() as connection:
            connection.execute(text("ANALYZE"))


@pytest.fixture
def sent(store: SqlStore) -> list[tuple[str, Any]]:
    """Statements with their parameters, from here on."""
    statements: list[tuple[str, Any]] = []

    def note(_conn: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
        if not statement.startswith(("BEGIN", "ANALYZE")):
            statements.append((statement, parameters))

    event.listen(store._db._reader, "before_cursor_execute", note)
    return statements


def test_a_claim_looks_at_few_of_ten_thousand_groups(
    store: SqlStore, sent: list[tuple[str, Any]]
) -> None:
    plan(store, JOBS, GROUPS)
    for _ in range(20):  # what is held comes first in the index
        assert store.claim_next(Stage.VERIFY, "big", "w", LEASE_SEC)
    sent.clear()
    assert store.claim_next(Stage.VERIFY, "big", "w", LEASE_SEC)
    who, claim, charge = list(sent)
    assert [statement.split()[0] for statement, _ in (who, claim, charge)] == [
        "SELECT", "UPDATE", "INSERT",
    ]  # fmt: skip
    with store._db._reader.connect() as connection:
        if not store._db.is_postgres:
            for statement, parameters in (who, claim):
                lines = connection.exec_driver_sql(
                    f"EXPLAIN QUERY PLAN {statement}", parameters
                ).all()
                found = "\n".join(str(line.detail) for line in lines)
                assert "ix_groups_next" in found, found
                assert "SCAN groups\n" not in f"{found}\n", found
                assert "ORDER BY" not in found, found
            return
        for statement, parameters in (who, claim):
            plan_of = connection.exec_driver_sql(
                f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters
            ).scalar_one()
            assert rows_touched(plan_of[0]["Plan"]) < 200, repr(plan_of)
        connection.rollback()


def rows_touched(plan_of: dict[str, Any]) -> float:
    """Rows of groups that a plan has read, in all its nodes and loops."""
    here = 0.0
    if plan_of.get("Relation Name") == "groups":
        passed_by = plan_of.get("Rows Removed by Filter", 0)
        here = (plan_of["Actual Rows"] + passed_by) * plan_of["Actual Loops"]
    return here + sum(rows_touched(part) for part in plan_of.get("Plans", []))


def test_the_life_of_a_group_that_is_not_drafted_for_takes_few_statements(
    store: SqlStore, sent: list[tuple[str, Any]]
) -> None:
    plan(store, 1, 2)
    sent.clear()
    work = store.claim_next(Stage.VERIFY, "big", "w", LEASE_SEC)
    assert work is not None
    store.advance(work.lease, Stage.RECORD, RESULTS, NO_TIME)
    index = work.lease.group_index or 0
    record = store.claim_group("job00000", index, Stage.RECORD, "w", LEASE_SEC)
    assert record is not None
    store.commit_group(record.lease, [completion(0)], NO_TIME, {"steps": 1})
    assert len(sent) <= 12  # and one COPY on PostgreSQL


def test_looking_takes_one_statement_where_no_job_has_a_limit(
    store: SqlStore, sent: list[tuple[str, Any]]
) -> None:
    plan(store, 2, 2)
    leases = []
    for _ in range(4):
        work = store.claim_next(Stage.VERIFY, "big", "w", LEASE_SEC)
        assert work is not None
        leases.append(work.lease)
    sent.clear()
    assert store.cancelled_jobs(dict.fromkeys(leases, 0.5)) == set()
    assert len(sent) == 1


CLAIMER = """
import sys
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.schemas.records import Stage
store = open_store(sys.argv[1])
while work := store.claim_next(Stage.VERIFY, "big", sys.argv[2], 600):
    print(work.lease.job_id, work.lease.group_index)
"""


@pytest.mark.pipeline  # starts processes
def test_processes_that_claim_at_once_share_all_groups_out(store: SqlStore, url: str) -> None:
    """Each once, none left; and every claim is charged."""
    plan(store, 3, 40)
    claimers = forks.together([("-c", CLAIMER, url, f"w{n}") for n in range(4)])
    assert [one.returncode for one in claimers] == [0] * 4
    claimed = Counter(line for one in claimers for line in one.stdout.splitlines())
    assert claimed == Counter(f"job{j:05d} {i}" for j in range(3) for i in range(40))
    with store._db._reader.connect() as connection:
        served = dict(connection.execute(text("SELECT tenant, served FROM tenants")).all())
    tokens = ROW_BOUND * sum(1 + i % 7 for i in range(40))
    # Who came last of the three began where the least of the others was, which is not its charge.
    assert min(served.values()) >= 0.999 * tokens * SEC_PER_TOKEN
    assert set(served) == {"tenant-0", "tenant-1", "tenant-2"}
