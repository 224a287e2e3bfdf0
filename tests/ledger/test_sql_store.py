"""What is true of one database only: its clock, its errors, its statements, its processes."""

from __future__ import annotations

import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ledger.builders import (
    DRAFTS,
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

from specbatch.pipeline.ledger.sql import databases
from specbatch.pipeline.ledger.sql.databases import make_engine, parse_url
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.ledger.sql.transactions import Transactions
from specbatch.schemas.errors import MissingExtraError, StoreError, UsageError
from specbatch.schemas.records import Lease, Stage
from support import forks
from support.databases import migrated
from support.servers import PrivatePostgres


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    """A store that goes by its own clock."""
    opened = open_store(url)
    yield opened
    opened.close()


def ingest(store: SqlStore, groups: int, first_stage: Stage = Stage.VERIFY) -> None:
    store.create_job(new_job())
    work = store.claim_job(JOB, Stage.INGEST, "i", LEASE_SEC)
    assert work is not None
    planned = [new_group(index, first_stage=first_stage) for index in range(groups)]
    store.add_groups(work.lease, planned, [], groups * 4, position())
    store.finish_ingest(work.lease, groups * 4, {})


def claim(store: SqlStore, index: int, stage: Stage, lease_sec: float = LEASE_SEC) -> Lease:
    work = store.claim_group(JOB, index, stage, "w", lease_sec)
    assert work is not None
    return work.lease


# --- clock ----------------------------------------------------------------------------------


def test_the_stores_own_clock_runs(store: SqlStore) -> None:
    ingest(store, 1)
    assert abs(store.get_job(JOB).created_at - time.time()) < 60
    first = claim(store, 0, Stage.VERIFY, lease_sec=0.0)
    second = claim(store, 0, Stage.VERIFY, lease_sec=LEASE_SEC)
    assert second.token == first.token + 1
    assert store.heartbeat([first, second], LEASE_SEC) == ({first}, set(), set())
    assert store.due() == []
    store.advance(second, Stage.RECORD, RESULTS, NO_TIME)
    assert 0 <= store.progress(JOB).queue_sec < 60


# --- statements -----------------------------------------------------------------------------


def test_the_life_of_a_group_takes_few_statements(store: SqlStore) -> None:
    ingest(store, 2, Stage.PROPOSE)
    statements: list[str] = []

    def note(_conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if not statement.startswith("BEGIN"):
            statements.append(statement)

    event.listen(store._db._reader, "before_cursor_execute", note)
    store.advance(claim(store, 0, Stage.PROPOSE), Stage.VERIFY, DRAFTS, NO_TIME)
    store.advance(claim(store, 0, Stage.VERIFY), Stage.RECORD, RESULTS, NO_TIME)
    store.commit_group(claim(store, 0, Stage.RECORD), [completion(0)], NO_TIME, {"steps": 1})
    assert len(statements) <= 14  # and one COPY on PostgreSQL


def test_the_sweepers_list_uses_its_indexes(store: SqlStore) -> None:
    ingest(store, 2)
    queries: list[tuple[str, Any]] = []

    def note(_conn: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
        if statement.startswith("SELECT") and "FROM tenant_budgets" not in statement:  # a few rows
            queries.append((statement, parameters))

    event.listen(store._db._reader, "before_cursor_execute", note)
    store.due()
    explain = "EXPLAIN " if store._db.is_postgres else "EXPLAIN QUERY PLAN "
    with store._db._reader.connect() as connection:
        if store._db.is_postgres:
            connection.execute(text("SET enable_seqscan = off"))  # the tables are too small
        for table, (query, parameters) in zip(("jobs", "groups"), list(queries), strict=True):
            plan = str(connection.exec_driver_sql(explain + query, parameters).all())
            assert f"ix_{table}_" in plan, plan


def test_groups_belong_to_a_job(store: SqlStore) -> None:
    with pytest.raises(StoreError, match=r"refused: .*(?i:foreign key)"):
        store._db.write(
            lambda conn: conn.execute(
                text("INSERT INTO rejected_rows VALUES ('nosuchjob', 1, NULL, 'c', 'r')")
            )
        )


def test_a_large_group_is_committed_and_read_in_pages(store: SqlStore) -> None:
    ingest(store, 1)
    store.advance(claim(store, 0, Stage.VERIFY), Stage.RECORD, RESULTS, NO_TIME)
    tokens = tuple(range(200))
    records = [
        completion(
            row,
            token_ids=tokens,
            origins=(1,) * 200,
            logprobs=tuple(-t / 64 for t in tokens),
            top_logprobs=tuple(((t, t + 1, 5), (-t / 64, -t / 32, -99.5)) for t in tokens),
        )
        for row in range(256)
    ]
    store.commit_group(claim(store, 0, Stage.RECORD), records, NO_TIME, {})
    assert list(store.completions(JOB, batch=100)) == records


# --- several processes ----------------------------------------------------------------------

CLAIMER = f"""
import sys
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.schemas.records import Stage
store = open_store(sys.argv[1])
for index in range(int(sys.argv[2])):
    if store.claim_group("{JOB}", index, Stage.VERIFY, sys.argv[3], 60):
        print(index)
"""


@pytest.mark.pipeline  # starts processes
def test_processes_never_claim_the_same_group(store: SqlStore, url: str) -> None:
    ingest(store, 60)
    claimers = forks.together([("-c", CLAIMER, url, "60", f"w{n}") for n in range(3)])
    assert [one.returncode for one in claimers] == [0, 0, 0]
    claimed = Counter(line for one in claimers for line in one.stdout.split())
    assert claimed == Counter(str(index) for index in range(60))


# --- errors ---------------------------------------------------------------------------------


def test_a_dropped_connection_is_replaced(postgres_url: str) -> None:
    store = open_store(postgres_url)
    ingest(store, 1)
    for kill in range(3):
        store._db.write(_end_other_connections)
        store._db.read(lambda conn: conn.execute(text("SELECT 1")))
        assert store.get_job(JOB).job_id == JOB, kill
    times = []

    def dies_once(conn: Any) -> int:
        times.append(1)
        conn.execute(text("UPDATE jobs SET rows_total = rows_total + 1"))
        if len(times) == 1:
            conn.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
        return len(times)

    before = store.get_job(JOB).rows_total
    assert store._db.write(dies_once) == 2
    assert store.get_job(JOB).rows_total == before + 1, "the first try was rolled back"
    store.close()


def _end_other_connections(conn: Any) -> None:
    conn.execute(
        text(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    )


def test_a_store_survives_its_servers_crash(own_postgres: PrivatePostgres) -> None:
    url = own_postgres.create_database()
    store = open_store(url)
    ingest(store, 1)
    lease = claim(store, 0, Stage.VERIFY)
    own_postgres.kill()
    impatient = SqlStore(url, retry_sec=0.3)
    with pytest.raises(StoreError, match=r"did not answer in time: ") as caught:
        impatient.get_job(JOB)
    assert "\n" not in str(caught.value)
    restart = threading.Timer(0.3, own_postgres.restart)
    restart.start()
    store.advance(lease, Stage.RECORD, RESULTS, NO_TIME)  # waits for the server
    restart.join()
    store.commit_group(claim(store, 0, Stage.RECORD), [completion(0)], NO_TIME, {})
    assert impatient.get_job(JOB).stage is Stage.PUBLISH
    store.close()
    impatient.close()


def test_a_database_that_does_not_exist_is_named_at_once(postgres_url: str) -> None:
    url = parse_url(postgres_url).set(database="nosuchdatabase", password="secret")
    store = SqlStore(url.render_as_string(hide_password=False), retry_sec=3600)
    with pytest.raises(StoreError, match="nosuchdatabase") as caught:
        store.list_jobs()  # it would take an hour if it were tried again
    assert "secret" not in str(caught.value)


def test_deadlocks_are_tried_again(postgres_url: str) -> None:
    store = open_store(postgres_url)
    for n in (1, 2):
        store.create_job(new_job(f"job0000000000000{n}"))
    database = store._db
    meeting = threading.Barrier(2)

    def work(first: int, second: int) -> int:
        tries = []

        def transaction(conn: Any) -> None:
            tries.append(1)
            for n in (first, second):
                conn.execute(
                    text("UPDATE jobs SET rows_total = rows_total + 1 WHERE job_id = :id"),
                    {"id": f"job0000000000000{n}"},
                )
                if n == first and len(tries) == 1:
                    meeting.wait(60)

        database.write(transaction)
        return len(tries)

    tries: list[int] = []
    threads = [
        threading.Thread(target=lambda: tries.append(work(1, 2))),
        threading.Thread(target=lambda: tries.append(work(2, 1))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(tries) == [1, 2]
    assert [job.rows_total for job in store.list_jobs()] == [2, 2]
    store.close()


def test_the_isolation_level_is_the_stores_own(postgres_url: str) -> None:
    engine = make_engine(postgres_url)
    name = parse_url(postgres_url).database
    with engine.begin() as conn:
        conn.execute(
            text(f'ALTER DATABASE "{name}" SET default_transaction_isolation=serializable')
        )
    engine.dispose()
    database = Transactions(postgres_url)
    assert database.read(lambda c: c.scalar(text("SHOW transaction_isolation"))) == "read committed"
    database.close()


def test_a_server_that_vanishes_silently_is_noticed(postgres_url: str) -> None:
    ours = parameters_of(postgres_url)
    assert {name: ours.get(name) for name in NOTICES} == NOTICES
    theirs = parameters_of(f"{postgres_url}?keepalives_idle=77&tcp_user_timeout=5000")
    said = {"keepalives_idle": "77", "tcp_user_timeout": "5000"}
    assert {name: theirs.get(name) for name in NOTICES} == NOTICES | said


NOTICES = {
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
}


def parameters_of(url: str) -> dict[str, str]:
    """What libpq took of a connection's options."""
    database = Transactions(url)
    found: dict[str, str] = database.read(
        lambda conn: conn.connection.driver_connection.info.get_parameters()  # type: ignore[union-attr]  # it is open
    )
    database.close()
    return found


def test_a_busy_sqlite_file_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "BUSY_TIMEOUT_MS", 20)
    url = migrated(tmp_path / "store.db")
    store = open_store(url)
    blocker = sqlite3.connect(tmp_path / "store.db", isolation_level=None, check_same_thread=False)
    blocker.execute("BEGIN IMMEDIATE")
    impatient = SqlStore(url, retry_sec=0.1)
    with pytest.raises(StoreError, match="is locked by another process: database is locked; try"):
        impatient.create_job(new_job())
    assert impatient.list_jobs() == [], "readers do not wait"
    ending = threading.Timer(0.2, blocker.execute, ["ROLLBACK"])
    ending.start()
    assert store.create_job(new_job())[1]
    ending.join()
    blocker.close()
    store.close()
    impatient.close()


def test_work_that_is_wrong_is_not_tried_again(url: str) -> None:
    database = Transactions(url)
    tries = []

    def work(conn: Any) -> None:
        tries.append(1)
        conn.execute(text("SELECT nonsense FROM nowhere"))

    with pytest.raises(StoreError):
        database.read(work)
    assert len(tries) == 1
    database.close()


# --- URLs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_every_spelling_of_postgresql_means_psycopg(scheme: str) -> None:
    assert parse_url(f"{scheme}://user@host/db").drivername == "postgresql+psycopg"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "mysql://user:secret@host/db",
            r"'mysql://user:\*\*\*@host/db' names mysql; use sqlite or",
        ),
        ("nonsense", "'nonsense' cannot be read"),
        ("sqlite://", "SQLite needs a file"),
        ("sqlite:///:memory:", "SQLite needs a file"),
    ],
)
def test_a_url_that_cannot_be_used_is_explained(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SqlStore(url)


def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'specbatch\[postgres\]'"):
        SqlStore("postgresql://host/db")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"folder .*/file/sub cannot be made"):
        SqlStore(f"sqlite:///{tmp_path}/file/sub/store.db")


def test_passwords_are_never_shown() -> None:
    shown = repr(SqlStore("postgresql://me:secret@host/db?password=secret2"))
    assert "secret" not in shown
