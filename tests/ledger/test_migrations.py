"""Migrations: up and down on both databases, and the same schema as the tables' own."""

from __future__ import annotations

import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contracts.shorthand import claim, claim_job, ingest, verified
from ledger.builders import JOB, NO_TIME, RESULTS, completion, new_job
from sqlalchemy import event, inspect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import Pool

from specbatch.pipeline.ledger.sql import migrate
from specbatch.pipeline.ledger.sql.databases import make_engine
from specbatch.schemas import sql_triggers
from specbatch.schemas.errors import StoreError
from specbatch.schemas.months import is_partition
from specbatch.schemas.placement import Site
from specbatch.schemas.provenance import NO_PROVENANCE, NO_TICKS, TICKS_PER_SEC, Ticks
from specbatch.schemas.records import Stage
from specbatch.schemas.speculation import AcceptanceCount, Decision, DecisionAction
from specbatch.schemas.tables import Base
from specbatch.schemas.timekeeping import Device, NewSession, Spent
from support import databases
from support.migrations import check, downgrade, revisions

TABLES = {
    "acceptance_days",
    "acceptance_priors",
    "api_keys",
    "audit_findings",
    "audit_log",
    "audits",
    "batches",
    "completions",
    "decisions",
    "draft_switches",
    "files",
    "groups",
    "jobs",
    "machine_knowledge",
    "rejected_rows",
    "models",
    "deployments",
    "rollouts",
    "rollout_groups",
    "pair_trials",
    "schedule_runs",
    "stage_usage",
    "staged_parts",
    "reusable_outputs",
    "tenant_budgets",
    "tenant_spending",
    "tenants",
    "time_slices",
    "worker_processes",
    "notifications",
    "worker_sessions",
}


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/100% new/store.db"
    found: str = request.getfixturevalue("empty_postgres_url")
    return found


@pytest.fixture(params=["sqlite", "postgres"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of the newest revision, with nothing in it."""
    if request.param == "sqlite":
        return databases.migrated(tmp_path / "store.db")
    found: str = request.getfixturevalue("postgres_url")
    return found


def schema_of(url: str) -> dict[str, Any]:
    """Everything the database says about its tables, in a form that can be compared."""
    engine = make_engine(url)
    found = inspect(engine)
    tables: dict[str, Any] = {
        name: {
            "columns": [
                (c["name"], repr(c["type"]), c["nullable"], c["default"])
                for c in sorted(found.get_columns(name), key=lambda c: c["name"])
            ],
            "key": found.get_pk_constraint(name),
            "foreign": found.get_foreign_keys(name),
            "unique": found.get_unique_constraints(name),
            "indexes": sorted(
                (i["name"], i["column_names"], _condition(i)) for i in found.get_indexes(name)
            ),
        }
        for name in found.get_table_names()
        if name != "alembic_version" and not is_partition(name)
    }
    tables |= {name: found.get_view_definition(name) for name in found.get_view_names()}
    with engine.connect() as connection:
        if connection.dialect.name == "postgresql":
            for query in (_FUNCTIONS, _PARTITIONS):
                tables |= {row[0]: row[1] for row in connection.execute(text(query))}
    engine.dispose()
    return tables


_FUNCTIONS = r"""
SELECT proname, pg_get_functiondef(oid) FROM pg_proc
WHERE proname LIKE 'specbatch%'
"""
_PARTITIONS = """
SELECT 'part ' || relname, coalesce(pg_get_partkeydef(oid), pg_get_expr(relpartbound, oid))
FROM pg_class
WHERE relname LIKE 'completions%' AND (relkind = 'p' OR relispartition AND relkind = 'r')
"""


def _condition(index: Any) -> list[str]:
    options = index.get("dialect_options", {})
    return [str(value) for name, value in options.items() if name.endswith("_where")]


def indexes_of(url: str) -> dict[str, str]:
    """What each index is made with: also how it sorts, which inspection does not tell."""
    query = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
    if not url.startswith("sqlite"):
        query = "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'"
    engine = make_engine(url)
    with engine.connect() as connection:
        found = {name: " ".join(made.split()) for name, made in connection.execute(text(query))}
    engine.dispose()
    return {name: made for name, made in found.items() if "alembic" not in name}


def test_indexes_sort_as_those_of_the_tables(new_url: str) -> None:
    migrated = indexes_of(new_url)
    downgrade(new_url, "0005")
    migrate.upgrade(new_url)
    assert indexes_of(new_url) == migrated
    downgrade(new_url)

    engine = make_engine(new_url)
    Base.metadata.create_all(engine)
    engine.dispose()
    assert indexes_of(new_url) == migrated


def test_a_migrated_database_needs_no_further_migration(url: str) -> None:
    assert migrate.current(url) is None
    assert check(url) != []
    migrate.upgrade(url)
    assert migrate.current(url) == migrate.head() == "0029"
    assert check(url) == []


def test_an_up_to_date_database_is_opened_and_used_over_one_connection(url: str) -> None:
    migrate.upgrade(url)
    made: list[object] = []

    def note(connection: object, _record: object) -> None:
        made.append(connection)

    event.listen(Pool, "connect", note)
    try:
        with closing(migrate.open_store(url)) as store:
            store.create_job(new_job())
            assert store.get_job(JOB).job_id == JOB
    finally:
        event.remove(Pool, "connect", note)
    assert len(made) == 1


def test_a_migrated_schema_is_the_schema_of_the_tables(url: str) -> None:
    migrate.upgrade(url)
    migrated = schema_of(url)
    downgrade(url)
    assert schema_of(url) == {}

    engine = make_engine(url)
    Base.metadata.create_all(engine)
    engine.dispose()
    assert schema_of(url) == migrated
    names = TABLES | {"token_record"}
    if not url.startswith("sqlite"):
        names |= {"part completions", "part completions_default", "specbatch_month"}
        names |= {f"specbatch_{kind}" for kind in ("origins", "repeated", "steps", "numbers")}
        names |= {name.split()[-1] for name in sql_triggers.dropping() if "FUNCTION" in name}
    assert set(migrated) == names


def test_down_and_up_again(url: str) -> None:
    migrate.upgrade(url)
    downgrade(url)
    assert migrate.current(url) is None
    migrate.upgrade(url)
    assert check(url) == []


def test_who_migrates_an_existing_database_says_that_earlier_versions_cannot_open_it(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = "from revision 0001 to 0029: earlier versions of specbatch cannot open it"
    for revision, expected in (("0001", 0), ("head", 1), ("head", 1)):
        migrate.upgrade(url, revision)
        assert caplog.text.count(said) == expected
    downgrade(url)
    caplog.clear()
    migrate.upgrade(url)
    assert "cannot open it" not in caplog.text, "a new one was opened by nobody"


def test_every_revision_can_be_taken_back(url: str) -> None:
    for revision in revisions():
        migrate.upgrade(url, revision)
        assert migrate.current(url) == revision
    for revision in reversed(revisions()[:-1]):
        downgrade(url, revision)
        assert migrate.current(url) == revision


def test_workers_of_the_version_before_can_insert_rows_behind_each_migration(url: str) -> None:
    """Workers change after the store. Those of 0.1.0 cannot: tables of theirs were made anew."""
    made_anew = {"0007": "completions", "0018": "acceptance_priors"}
    before: dict[str, set[str]] = {}
    for revision in revisions():
        migrate.upgrade(url, revision)
        after = _required(url)
        if revision > "0005":
            more = {name: after[name] - before[name] for name in before if name in after}
            more.pop(made_anew.get(revision, ""), None)
            assert not any(more.values()), f"{revision}: {more}"
        before = after


def _required(url: str) -> dict[str, set[str]]:
    """The columns by table that an INSERT has to name."""
    engine = make_engine(url)
    found = inspect(engine)
    required = {
        table: {
            column["name"]
            for column in found.get_columns(table)
            if not column["nullable"] and column["default"] is None
        }
        for table in found.get_table_names()
        if not is_partition(table)
    }
    engine.dispose()
    return required


def test_completions_outlive_new_columns_and_their_removal(url: str) -> None:
    """What was recorded before anybody could ask for the most likely tokens has none."""
    migrate.upgrade(url, "0001")
    old = {"row_id": "r", "seed": 5, "prompt_tokens": 1, "text": "x", "finish_reason": "stop"}
    old["origins"] = "[1, 1, 2, 0, 3, 1]" if url.startswith("sqlite") else [1, 1, 2, 0, 3, 1]
    lists = ("token_ids", "logprobs", "proposed_at_depth", "accepted_at_depth")
    numbers = ("proposed", "accepted", "verifier_passes", "cost_usd", "compute_sec", "draft_sec")
    old |= dict.fromkeys((*numbers, "decode_sec", "baseline_sec"), 0) | {"verifier": "v"}
    old |= {"job_id": JOB, "row_index": 3, "sample_index": 0, "group_index": 0}
    old |= dict.fromkeys(lists, "[7]" if url.startswith("sqlite") else [7])
    store = migrate.open_store(url, migrate=False)
    engine = make_engine(url)
    with engine.begin() as connection:
        values = ", ".join(f":{name}" for name in old)
        connection.execute(text(_JOB))
        connection.execute(
            text(f"INSERT INTO completions ({', '.join(old)}) VALUES ({values})"), old
        )
    for revision in ("0002", "0001", "0002", "head", "0001", "head"):
        (downgrade if revision == "0001" else migrate.upgrade)(url, revision)
        with engine.connect() as connection:
            count = connection.execute(text("SELECT count(*) FROM completions")).scalar()
        assert count == 1
    with engine.connect() as connection:
        tokens = connection.execute(text("SELECT position, token_id, ticks FROM token_record"))
        assert [tuple(row) for row in tokens] == [(0, 7, 0)]
    engine.dispose()
    [kept] = store.completions(JOB)
    store.close()
    assert kept.origins == (1, 1, 2, 0, 3, 1)
    assert (kept.verifier, kept.proposer) == ("v", None)
    assert (kept.row_index, kept.token_ids, kept.logprobs) == (3, (7,), (7.0,))
    assert kept.top_logprobs is None
    assert (kept.provenance, kept.ticks, kept.price_microusd) == (NO_PROVENANCE, NO_TICKS, 0)


def test_packed_completions_are_spelled_out_when_their_columns_go(new_url: str) -> None:
    store = migrate.open_store(new_url)
    record = completion(
        0, origins=(0, 1, 1, 3, 1), token_ids=(1, 2, 128_255, 4, 32_768), logprobs=(0.0,) * 5
    )
    record = replace(record, top_logprobs=None, compute_sec=record.ticks.total / TICKS_PER_SEC)
    ingest(store, groups=1)
    store.commit_group(verified(store, 0), [record], NO_TIME, {})
    downgrade(new_url, "0006")
    columns = "token_ids, origins, proposed_at_depth, verifier, proposer, compute_sec"
    engine = make_engine(new_url)
    with engine.connect() as connection:
        kept = connection.execute(text(f"SELECT {columns} FROM completions")).one()
    engine.dispose()
    lists = [tuple(json.loads(v) if isinstance(v, str) else v) for v in kept[:3]]
    assert lists == [record.token_ids, record.origins, record.proposed_at_depth]
    assert (kept.verifier, kept.proposer) == (record.verifier, record.proposer)
    assert kept.compute_sec == record.compute_sec
    migrate.upgrade(new_url)
    [again] = store.completions(JOB)
    store.close()
    later = ("numeric_class", "model_fingerprint", "receipt", "reused_from", "score")
    lost = {**NO_PRICES, **dict.fromkeys(later)}
    assert again == replace(record, provenance=NO_PROVENANCE, ticks=NO_TICKS, **lost)


NO_PRICES: dict[str, Any] = {"price_microusd": 0, "ahead_ticks": 0, "ahead_price_microusd": 0}
_JOB = f"""
INSERT INTO jobs (job_id, name, tenant, spec, spec_digest, verifier, output_uri, workspace_uri,
    state, cancel_requested, ingest_done, next_row, groups_total, rows_total, rows_rejected,
    prompt_tokens, report, created_at, stage, generation, lease_until, attempts, ready_at)
VALUES ('{JOB}', 'n', 't', '{{}}', 'd', 'v', 'o', 'w', 'done', false, true, 0, 0, 0, 0, 0, '{{}}',
    0, 'end', 0, 0, 0, 0)
"""


def test_jobs_of_before_have_normal_priority_and_whole_groups(new_url: str) -> None:
    downgrade(new_url, "0003")
    engine = make_engine(new_url)
    with engine.begin() as connection:
        connection.execute(text(_JOB))
    migrate.upgrade(new_url)
    with engine.connect() as connection:
        kept = connection.execute(text("SELECT priority, deadline_at, groups_cut FROM jobs")).one()
    engine.dispose()
    assert tuple(kept) == (1, None, 0)


def test_jobs_from_before_classes_and_fingerprints_are_of_unknown_ones(new_url: str) -> None:
    downgrade(new_url, "0003")
    engine = make_engine(new_url)
    with engine.begin() as connection:
        connection.execute(text(_JOB))
    engine.dispose()
    migrate.upgrade(new_url)
    store = migrate.open_store(new_url)
    old, new = store.get_job(JOB), store.create_job(new_job("job00001"))[0]
    store.close()
    assert (old.numeric_class, new.numeric_class) == ("unknown", None)
    assert (old.model_fingerprint, new.model_fingerprint) == ("unknown", None)


def test_no_statement_stumbles_over_a_null_character_in_a_job_of_before(new_url: str) -> None:
    downgrade(new_url, "0003")
    stop = ["\0", "a\0\0b", "\\u0000", "\\\0"]
    engine = make_engine(new_url)
    with engine.begin() as connection:
        connection.execute(text(_JOB.replace("'done'", "'queued'").replace("'end'", "'ingest'")))
        stored = json.dumps({"sampling": {"stop": stop}})
        connection.execute(text("UPDATE jobs SET spec = :spec"), {"spec": stored})
    engine.dispose()
    migrate.upgrade(new_url)
    with closing(migrate.open_store(new_url, site=Site("eu", False))) as store:
        assert claim_job(store, Stage.INGEST).lease.job_id == JOB
        kept = store.get_job(JOB).spec["sampling"]["stop"]
    is_sqlite = new_url.startswith("sqlite")
    assert kept == (stop if is_sqlite else ["\ufffd", "a\ufffd\ufffdb", "\\u0000", "\\\ufffd"])


def test_what_drafting_taught_is_all_that_its_removal_loses(new_url: str) -> None:
    store = migrate.open_store(new_url)
    store.create_job(new_job())
    store.note_decisions(JOB, [Decision(1.0, DecisionAction.OFF, "*", "nothing was gained")])
    store.keep_knowledge("cpu", {"step_time": 1})
    store.learn_acceptance("default", "nightly", [AcceptanceCount("ngram", None, 1.0, 2.0)])
    downgrade(new_url, "0002")
    engine = make_engine(new_url)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT name FROM jobs")) == "nightly"
    engine.dispose()
    with pytest.raises(StoreError, match="has old ones; migrate it"):
        store.decisions(JOB)
    migrate.upgrade(new_url)
    assert store.decisions(JOB) == []
    assert store.knowledge("cpu") is None
    assert store.acceptance("default", "nightly") == []
    store.close()


def test_the_audit_log_is_kept_from_a_job_of_before_and_taken_back_with_its_table(
    new_url: str,
) -> None:
    store = migrate.open_store(new_url)
    store.create_job(new_job())
    assert len(list(store.log(JOB))) == 1
    downgrade(new_url, "0008")
    engine = make_engine(new_url)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT name FROM jobs")) == "nightly"
    migrate.upgrade(new_url)
    assert list(store.log(JOB)) == []
    store.request_cancel(JOB, "by somebody")
    assert [entry.kind for entry in store.log(JOB)] == ["adopted", "cancelled"]
    with pytest.raises(DBAPIError, match="only added to"), engine.begin() as connection:
        connection.execute(text("DELETE FROM audit_log"))
    engine.dispose()
    store.close()


def test_what_workers_told_of_their_time_is_all_that_its_removal_loses(new_url: str) -> None:
    store = migrate.open_store(new_url)
    ingest(store, groups=1)
    store.begin_session(NewSession("s", "w", Device("cpu", "local", "spot", 5), 0))
    lease, ticks = claim(store, 0).lease, Ticks(verify=3)
    store.advance(lease, Stage.RECORD, RESULTS, NO_TIME, Spent("s", 9, ticks))
    store.commit_group(claim(store, 0, Stage.RECORD).lease, [completion(0)], NO_TIME, {})
    downgrade(new_url, "0007")
    migrate.upgrade(new_url)
    assert not store.sessions()
    assert not list(store.time_slices())
    assert store.progress(JOB).completions == 1
    assert store.row_times(JOB)[0].documents == 1
    store.close()


def test_upgrading_twice_keeps_what_is_there(new_url: str) -> None:
    store = migrate.open_store(new_url)
    store.create_job(new_job())
    store.close()
    again = migrate.open_store(new_url)
    assert again.get_job(JOB).name == "nightly"
    again.close()


def test_many_starting_at_once_migrate_once(url: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda _: migrate.upgrade(url), range(6))) == [None] * 6
    assert check(url) == []


def test_a_database_of_a_newer_version_is_refused(new_url: str) -> None:
    engine = make_engine(new_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(StoreError, match="newer specbatch"):
        migrate.open_store(new_url)


def test_a_failed_migration_leaves_nothing_behind(url: str) -> None:
    engine = make_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE completions (a INTEGER)"))
    with pytest.raises(StoreError, match="completions"):
        migrate.upgrade(url)
    assert migrate.current(url) is None
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE completions"))
    engine.dispose()
    assert schema_of(url) == {}
    migrate.upgrade(url)


def test_a_store_without_tables_says_what_to_do(url: str) -> None:
    store = migrate.open_store(url, migrate=False)
    with pytest.raises(StoreError, match="lacks specbatch's tables or has old ones; migrate it"):
        store.list_jobs()
    store.close()


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_text("this is not a database, and it is long enough to be taken for one" * 20)
    with pytest.raises(StoreError, match=r"store\.db refused: file is not a database"):
        migrate.open_store(f"sqlite:///{path}")


def test_sqlite_files_are_in_wal_mode(tmp_path: Path) -> None:
    migrate.open_store(f"sqlite:///{tmp_path}/store.db").close()
    connection = sqlite3.connect(tmp_path / "store.db")
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()
