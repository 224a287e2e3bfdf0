"""Completions by month on PostgreSQL: made when a job is, by whoever makes it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import psycopg
import pytest
from contracts.shorthand import claim_job, verified
from ledger.builders import JOB, NO_TIME, RESULTS, Clock, completion, new_group, new_job, position
from ledger.test_roles import WHO, Login, login, run, scalar, store_of

from specbatch.pipeline.ledger.sql import migrate
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.errors import StoreError
from specbatch.schemas.months import month_of
from specbatch.schemas.records import Stage
from specbatch.schemas.sql_roles import AUDITOR, OPERATOR, WORKER
from support.migrations import check

__all__ = ["login"]  # a fixture: pytest finds it by its name
PARTS = "SELECT string_agg(DISTINCT tableoid::regclass::text, ' ') FROM completions"


def at(year: int, month: int, day: int = 15) -> float:
    return datetime(year, month, day, tzinfo=UTC).timestamp()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(postgres_url: str, clock: Clock) -> Iterator[SqlStore]:
    opened = migrate.open_store(postgres_url, clock=clock)
    yield opened
    opened.close()


def do_job(store: SqlStore, job_id: str = JOB) -> None:
    """A job with one completion."""
    store.create_job(new_job(job_id=job_id, idempotency_key=None))
    work = store.claim_job(job_id, Stage.INGEST, "w", 60.0)
    assert work is not None
    store.add_groups(work.lease, [new_group(0)], [], 4, position())
    lease = store.claim_group(job_id, 0, Stage.VERIFY, "w", 60.0)
    assert lease is not None
    store.advance(lease.lease, Stage.RECORD, RESULTS, NO_TIME)
    record = store.claim_group(job_id, 0, Stage.RECORD, "w", 60.0)
    assert record is not None
    store.commit_group(record.lease, [completion(0)], NO_TIME, {})


def test_months_are_those_of_greenwich() -> None:
    assert month_of(0.0) == 197001
    assert month_of(at(2026, 12, 31)) == 202612
    assert month_of(at(2027, 1, 1) - 0.001) == 202612


def test_a_job_s_completions_lie_in_the_month_it_was_made_in(
    store: SqlStore, clock: Clock, postgres_url: str
) -> None:
    for number, (year, month) in enumerate(((2026, 11), (2026, 12), (2027, 1))):
        clock.now = at(year, month)
        do_job(store, f"job{number:014}")
    names = [f"completions_{month}" for month in (202611, 202612, 202701)]
    assert scalar(postgres_url, PARTS) == " ".join(names)
    assert check(postgres_url) == []
    for number in range(3):
        [found] = store.completions(f"job{number:014}")
        assert found == completion(0)


def test_a_month_goes_by_dropping_its_table(
    store: SqlStore, clock: Clock, postgres_url: str
) -> None:
    clock.now = at(2026, 11)
    do_job(store)
    run(postgres_url, "DROP TABLE completions_202611")
    assert list(store.completions(JOB)) == []


def test_where_no_partition_can_be_made_now_the_default_one_takes_the_rows(
    store: SqlStore, clock: Clock, postgres_url: str
) -> None:
    clock.now = at(2026, 11)
    with psycopg.connect(postgres_url) as reader:  # holds its lock until it ends
        reader.execute("SELECT count(*) FROM completions_default")
        do_job(store)
    assert scalar(postgres_url, PARTS) == "completions_default"
    clock.now += 60
    do_job(store, "another-job")
    assert scalar(postgres_url, PARTS) == "completions_default"
    clock.now = at(2026, 12)
    do_job(store, "a-later-job")
    assert scalar(postgres_url, PARTS) == "completions_202612 completions_default"


def test_no_partition_is_tried_for_a_month_whose_rows_the_default_one_has(
    store: SqlStore, clock: Clock, postgres_url: str
) -> None:
    """It would lock that partition, and everybody would wait for it, at each submission."""
    clock.now = at(2026, 11)
    with psycopg.connect(postgres_url) as reader:
        reader.execute("SELECT count(*) FROM completions_default")
        do_job(store)
    run(postgres_url, _NO_NEW_TABLES)
    do_job(store, "another-job")
    clock.now = at(2026, 12)
    with pytest.raises(StoreError, match="no new tables"):
        store.create_job(new_job("a-later-job", idempotency_key=None))


_NO_NEW_TABLES = """
CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql
  AS $$ BEGIN RAISE 'no new tables'; END $$;
CREATE EVENT TRIGGER refuse ON ddl_command_start WHEN TAG IN ('CREATE TABLE')
  EXECUTE FUNCTION refuse();
"""


def test_whoever_submits_makes_months_and_no_other_tables(login: Login, postgres_url: str) -> None:
    with store_of(login(OPERATOR)) as operator, store_of(login(WORKER)) as worker:
        operator.create_job(new_job())
        lease = claim_job(worker, Stage.INGEST, WHO).lease
        worker.add_groups(lease, [new_group(0)], [], 4, position())
        worker.commit_group(verified(worker, 0, WHO), [completion(0)], NO_TIME, {})
        month = scalar(postgres_url, PARTS)
    assert month == f"completions_{scalar(postgres_url, 'SELECT max(month) FROM completions')}"
    auditor = login(AUDITOR)
    assert scalar(auditor, "SELECT count(*) FROM token_record") == 3
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        run(auditor, "SELECT specbatch_month(202801)")
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        run(login(OPERATOR), "SELECT specbatch_month(202813)")


def test_many_submitters_at_once_make_one_month(postgres_url: str) -> None:
    migrate.open_store(postgres_url).close()
    months = range(203001, 203013)
    with ThreadPoolExecutor(8) as threads:
        made = [
            threads.submit(run, postgres_url, f"SELECT specbatch_month({month})")
            for month in months
            for _ in range(8)
        ]
    assert [one.exception() for one in made] == [None] * len(made)
    parts = scalar(
        postgres_url,
        "SELECT count(*) FROM pg_inherits WHERE inhrelid::regclass::text ~ '_2030[0-9]{2}$'",
    )
    assert parts == len(months)
