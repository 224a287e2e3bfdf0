"""What workers, operators and auditors may do in PostgreSQL, tried with logins of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from contracts.shorthand import F32, TORCH, claim, claim_job, commit, finish, serving, verified
from ledger.audited import told
from ledger.builders import JOB, LEASE_SEC, NO_TIME, completion, new_group, new_job, position
from sqlalchemy import make_url

from specbatch.pipeline.ledger.sql import migrate
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.operations.export import Exporter
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.audit import AuditRecord, EntryKind
from specbatch.schemas.errors import StoreError
from specbatch.schemas.exports import ExportKind, ExportOrder
from specbatch.schemas.policies import HELD_BACK, Decided
from specbatch.schemas.provenance import Ticks
from specbatch.schemas.records import FinishReason, JobState, Lease, RejectedRow, Stage
from specbatch.schemas.registry import DeployScope, NewModel, PairTrial
from specbatch.schemas.rollouts import Observed, Outcome
from specbatch.schemas.speculation import AcceptanceCount, Decision, DecisionAction
from specbatch.schemas.sql_roles import (
    AUDITOR,
    OPERATOR,
    PRIVACY,
    RIGHTS,
    ROLES,
    TABLES,
    TEXTS,
    WORKER,
    how_to_create,
)
from specbatch.schemas.tables import Base
from specbatch.schemas.timekeeping import Attempt, Device, NewSession, SessionTime
from support.migrations import downgrade
from support.servers import PrivatePostgres

PASSWORD = "long-enough-to-be-one"
GONE_SEC = 60
WHO = "host:41"  # a worker, as the log names them
Login = Callable[[str], str]


def run(url: str, *statements: str) -> None:
    """As the user of the URL, one transaction each."""
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def scalar(url: str, query: str) -> object:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def refused(url: str, statement: str) -> bool:
    """Whether the server says that this user may not do it; whatever else it says is raised."""
    try:
        run(url, statement)
    except psycopg.errors.InsufficientPrivilege:
        return True
    return False


@pytest.fixture
def login(postgres_url: str) -> Iterator[Login]:
    """`login(WORKER)`: the URL of a fresh login that has this role, in a migrated database."""
    made: list[str] = []

    def make(role: str) -> str:
        name = f"login_{role.removeprefix('specbatch_')}_{len(made)}"
        run(postgres_url, f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}' IN ROLE {role}")
        made.append(name)
        url = make_url(postgres_url).set(username=name, password=PASSWORD)
        return url.render_as_string(hide_password=False)

    yield make
    for name in made:  # the server ends a closed connection in its own time
        run(
            postgres_url,
            f"SELECT pg_terminate_backend(pid, {1000 * GONE_SEC}) FROM pg_stat_activity"
            f" WHERE usename = '{name}'",
        )
        run(postgres_url, f"DROP ROLE {name}")


@contextmanager
def store_of(url: str) -> Iterator[SqlStore]:
    """As every command opens it: it looks whether to migrate, and need not."""
    store = migrate.open_store(url)
    try:
        yield store
    finally:
        store.close()


def test_an_operator_and_a_worker_do_a_job_together_and_an_auditor_reads_it(login: Login) -> None:
    with store_of(login(OPERATOR)) as operator, store_of(login(WORKER)) as worker:
        operator.create_job(new_job())
        lease = claim_job(worker, Stage.INGEST, WHO).lease
        worker.add_groups(
            lease, [new_group(0), new_group(1)], [RejectedRow(8, "r", "bad", "x")], 8, position(8)
        )
        worker.note_report(lease, {"vocabulary": "v"})
        worker.finish_ingest(lease, 8, {})
        held = verified(worker, 0, WHO)
        worker.heartbeat([held], LEASE_SEC)
        commit(worker, held)
        worker.cancelled_jobs({held: 1.0})  # by a heartbeat that began before: it is passed by
        worker.note_decisions(JOB, [Decision(1.0, DecisionAction.OFF, "*", "nothing gained")])
        worker.keep_knowledge("device", {"a": 1})
        worker.learn_acceptance("default", "nightly", [AcceptanceCount("block", "news", 3, 4)])
        assert operator.supersede_acceptance("default", "nightly") == 0
        assert worker.forget_old_acceptance(1) == 0
        lease = claim(worker, 1, owner=WHO).lease
        worker.begin_session(NewSession("s", "w", Device("cpu", "local", "spot", 5), 0))
        for seen in (1, 2):
            worker.report_time(SessionTime("s", seen), {Attempt.of(lease): Ticks(verify=seen)})
        worker.release(lease, "it broke", forgiven=True)
        worker.end_silent_sessions(0.0)
        operator.request_cancel(JOB)
        worker.skip_proposals(0.0)
        finish(worker, JobState.CANCELLED, owner=WHO)
        assert operator.retry_job(JOB) == 1
        commit(worker, verified(worker, 1, WHO))
        finish(worker, owner=WHO)
        with store_of(login(AUDITOR)) as auditor:
            assert auditor.get_job(JOB).state is JobState.DONE
            assert auditor.progress(JOB).completions == 8
            assert len(list(auditor.completions(JOB))) == 8
            assert len(list(auditor.rejected(JOB))) == 1
            assert len(auditor.decisions(JOB)) == 1
            assert auditor.knowledge("device") == {"a": 1}
            assert [(s.leased, s.spent) for s in auditor.sessions(JOB)] == [(2, 2)]
            assert len(list(auditor.time_slices(JOB))) == len(auditor.job_times(JOB)) == 1
            assert len(auditor.row_times(JOB)) == 1
            assert len(auditor.acceptance("default", "nightly")) == 1
            assert told(auditor) == []
            auditor.keep_audit(AuditRecord(JOB, 8, 0, 24, True))
            assert auditor.correctness().share == 1.0


def test_workers_decide_rollouts_and_operators_begin_and_promote(login: Login) -> None:
    with store_of(login(OPERATOR)) as operator, store_of(login(WORKER)) as worker:
        for fingerprint in ("aa", "bb"):
            operator.add_model(NewModel(fingerprint, "docs", "/models"))
        operator.promote("aa", DeployScope(), "the first")
        operator.add_pair_trial(PairTrial("v", "bb", "exact/f32/1", True, "drafts can pay", {}))
        assert [trial.pays for trial in worker.pair_trials()] == [True]
        rollout = operator.begin_rollout("bb", DeployScope(), (0.5, 1.0), "trained")
        with pytest.raises(StoreError, match="permission denied"):
            operator.observe_rollout(rollout.number, JOB, 0, Observed(0.5, True, 1, 1.0))
        for index in range(60):
            mine = index % 2 == 0
            seen = Observed(0.5, mine, 1000 if mine else 10, 1.0)
            rollout = worker.observe_rollout(rollout.number, JOB, index, seen)
        assert rollout.outcome is Outcome.BETTER
        for forbidden in (
            worker.settle_rollouts,
            lambda: worker.promote("bb", DeployScope(), "mine"),
            lambda: worker.begin_rollout("bb", DeployScope(tag="x"), (0.5, 1.0), "mine"),
        ):
            with pytest.raises(StoreError, match="permission denied"):
                forbidden()
        assert len(operator.settle_rollouts()) == 1
        assert [one.fingerprint for one in worker.deployments()] == ["bb"]


@pytest.mark.parametrize("role", ROLES)
def test_nobody_changes_or_empties_a_table(login: Login, role: str) -> None:
    url = login(role)
    for table in TABLES:
        assert refused(url, f"DROP TABLE {table}"), table
        assert refused(url, f"ALTER TABLE {table} ADD COLUMN more integer"), table
        assert refused(url, f"TRUNCATE {table} CASCADE"), table
        deletes = table in RIGHTS[role].deletes
        assert refused(url, f"DELETE FROM {table} WHERE false") is not deletes, table
        assert refused(url, f"CREATE TRIGGER t AFTER INSERT ON {table} EXECUTE FUNCTION f()")
        hides = table in RIGHTS[role].hidden
        assert refused(url, f"SELECT * FROM {table} LIMIT 1") is hides, table
    assert refused(url, f"CREATE ROLE another_{role}")
    assert refused(url, "UPDATE alembic_version SET version_num = '0001'")


def test_a_worker_cannot_rewrite_what_is_recorded_nor_submit(login: Login) -> None:
    url = login(WORKER)
    assert refused(url, "UPDATE completions SET text = 'other'")
    assert refused(url, "UPDATE rejected_rows SET reason = 'other'")
    assert refused(url, "UPDATE decisions SET reason = 'other'")
    assert refused(url, "UPDATE audit_log SET actor = 'other'")
    with store_of(url) as worker, pytest.raises(StoreError, match="refused: permission denied"):
        worker.create_job(new_job())


def test_an_operator_moves_a_job_to_another_numeric_class(login: Login) -> None:
    with store_of(login(OPERATOR)) as operator, store_of(login(WORKER)) as worker:
        operator.create_job(new_job())
        lease = claim_job(worker, Stage.INGEST, WHO).lease
        worker.add_groups(lease, [new_group(0)], [], 4, position(4))
        worker.finish_ingest(lease, 4, {})
        assert worker.claim_next(Stage.VERIFY, "big", WHO, LEASE_SEC, serving(F32))
        assert operator.retry_job(JOB, numeric_class=TORCH) == 1
        assert worker.claim_next(Stage.VERIFY, "big", WHO, LEASE_SEC, serving(TORCH))


def planned(operator: SqlStore, worker: SqlStore) -> Lease:
    """A job of one group, which is verified; its lease to record it."""
    operator.create_job(new_job())
    lease = claim_job(worker, Stage.INGEST, WHO).lease
    worker.add_groups(lease, [new_group(0)], [], 4, position(4))
    worker.finish_ingest(lease, 4, {})
    return verified(worker, 0, WHO)


def test_an_operator_writes_no_results(login: Login) -> None:
    url = login(OPERATOR)
    for column in ("prompts", "drafts", "results", "source", "completions"):
        assert refused(url, f"UPDATE groups SET {column} = NULL"), column
    for column in ("spec", "workspace_uri", "output_uri", "verifier", "report"):
        assert refused(url, f"UPDATE jobs SET {column} = NULL"), column
    for table in ("completions", "groups", "rejected_rows", "decisions", "machine_knowledge"):
        assert refused(url, f"INSERT INTO {table} DEFAULT VALUES"), table
    with store_of(login(OPERATOR)) as operator, store_of(login(WORKER)) as worker:
        mine = planned(operator, worker)
        with pytest.raises(StoreError, match="permission denied"):
            operator.commit_group(mine, [completion(0)], NO_TIME, {})
        commit(worker, mine)


def test_an_operator_sees_figures_and_no_texts(login: Login) -> None:
    url = login(OPERATOR)
    for column in TEXTS:
        assert refused(url, f"SELECT {column} FROM completions"), column
    assert not refused(url, "SELECT row_index, tag, origins, cost_usd, digest FROM completions")
    with store_of(url) as operator:
        operator.create_job(new_job())
        assert operator.progress(JOB).completions == 0
        assert operator.kept_rows(JOB) == set()
        assert list(operator.row_figures(JOB)) == list(operator.group_figures(JOB)) == []
        assert operator.backlog().jobs[JobState.QUEUED] == 1
        with pytest.raises(StoreError, match="permission denied"):
            list(operator.completions(JOB))


def test_an_operator_reviews_without_seeing_texts_and_nobody_else_does(login: Login) -> None:
    held = completion(0, finish_reason=FinishReason.REVIEW, error="held back", reused_from=None)
    with store_of(login(OPERATOR)) as operator, store_of(login(WORKER)) as worker:
        mine = planned(operator, worker)
        worker.commit_group(mine, [held], NO_TIME, {HELD_BACK: 1.0})
        finish(worker, owner=WHO)
        assert operator.reviews(JOB).pending == [(0, 0)]
        for refused_to in (WORKER, AUDITOR, PRIVACY):
            with store_of(login(refused_to)) as other, pytest.raises(StoreError):
                other.review_job(JOB, {(0, 0): Decided.RELEASED})
        operator.review_job(JOB, {(0, 0): Decided.RELEASED})
        assert operator.get_job(JOB).stage is Stage.PUBLISH
        assert operator.reviews(JOB).decided == {(0, 0): Decided.RELEASED}
        finish(worker, owner=WHO)
        assert operator.get_job(JOB).state is JobState.DONE


def test_who_purges_empties_texts_without_seeing_them_and_writes_nothing_else(
    login: Login,
) -> None:
    url = login(PRIVACY)
    with store_of(login(OPERATOR)) as operator, store_of(login(WORKER)) as worker:
        operator.create_job(new_job())
        lease = claim_job(worker, Stage.INGEST, WHO).lease
        worker.add_groups(lease, [new_group(0)], [RejectedRow(4, "r", "bad", "x")], 5, position(5))
        worker.finish_ingest(lease, 5, {})
        commit(worker, verified(worker, 0, WHO))
        finish(worker, owner=WHO)
        for store in (operator, worker):
            with pytest.raises(StoreError, match="kind purged are for another role: use a login"):
                list(store.purge(JOB, "not theirs to do"))
        with store_of(url) as privacy:
            assert list(privacy.purge(JOB, "asked for", batch_rows=3)) == [0, 3, 5]
            with pytest.raises(StoreError, match="permission denied"):
                list(privacy.completions(JOB))
        with store_of(login(AUDITOR)) as auditor:
            assert [record.text for record in auditor.completions(JOB)] == [""] * 4
    for column in ("tag", "origins", "cost_usd", "digest", "finish_reason"):
        assert refused(url, f"UPDATE completions SET {column} = NULL"), column
    for column in ("state", "spec", "privacy", "error", "stage"):
        assert refused(url, f"UPDATE jobs SET {column} = NULL"), column


def test_operators_read_texts_again_after_the_downgrade(postgres_url: str, login: Login) -> None:
    url = login(OPERATOR)
    downgrade(postgres_url, "0009")
    assert not refused(url, "SELECT text FROM completions")
    migrate.upgrade(postgres_url)
    assert refused(url, "SELECT text FROM completions")


def test_every_table_and_column_is_named_as_it_is() -> None:
    tables = Base.metadata.tables
    assert set(TABLES) == set(tables) | {"alembic_version"}
    for rights in RIGHTS.values():
        assert set(rights.inserts) <= set(tables)
        named = (rights.inserted, rights.columns, rights.hidden)
        for table, columns in (item for of_tables in named for item in of_tables.items()):
            assert set(columns) <= set(tables[table].columns.keys())


def test_an_auditor_only_reads_and_keeps_audits(login: Login) -> None:
    url = login(AUDITOR)
    for table in set(TABLES) - {"audits", "audit_findings", "audit_log"}:
        assert refused(url, f"INSERT INTO {table} DEFAULT VALUES"), table
    assert refused(url, "UPDATE jobs SET cancel_requested = true")
    assert refused(url, "UPDATE groups SET stage = 'done'")
    assert refused(url, "SELECT nextval('decisions_id_seq')")
    with store_of(url) as auditor, pytest.raises(StoreError, match="permission denied"):
        auditor.create_job(new_job())


def test_the_roles_have_no_login_and_no_powers(postgres_url: str) -> None:
    powers = "rolcanlogin OR rolsuper OR rolcreaterole OR rolcreatedb OR rolbypassrls"
    query = f"SELECT count(*) FROM pg_roles WHERE rolname LIKE 'specbatch\\_%' AND ({powers})"
    assert scalar(postgres_url, query) == 0
    assert all(role in how_to_create() for role in ROLES)


def roles(url: str) -> int:
    names = ", ".join(f"'{role}'" for role in ROLES)
    count = scalar(url, f"SELECT count(*) FROM pg_roles WHERE rolname IN ({names})")
    assert isinstance(count, int)
    return count


def test_the_downgrade_takes_the_rights_back_and_leaves_roles_that_somebody_has(
    postgres_url: str, login: Login
) -> None:
    url = login(AUDITOR)
    downgrade(postgres_url, "0004")
    assert refused(url, "SELECT * FROM jobs")
    assert roles(postgres_url) >= 1  # the one that a login has
    migrate.upgrade(postgres_url)
    assert not refused(url, "SELECT * FROM jobs")
    assert roles(postgres_url) == len(ROLES)


def test_a_migration_that_may_not_create_roles_says_what_to_run_and_goes_on(
    own_postgres: PrivatePostgres, caplog: pytest.LogCaptureFixture
) -> None:
    admin = own_postgres.create_database()
    database = str(make_url(admin).database)
    run(
        admin,
        f"CREATE ROLE plain_owner LOGIN PASSWORD '{PASSWORD}'",
        f'ALTER DATABASE "{database}" OWNER TO plain_owner',
    )
    owner = make_url(admin).set(username="plain_owner", password=PASSWORD)
    url = owner.render_as_string(hide_password=False)
    with caplog.at_level(logging.WARNING, logger="specbatch.migrations"):
        migrate.upgrade(url)
    assert f"have an administrator run `{how_to_create()}`" in caplog.text
    assert migrate.current(url) == migrate.head()
    assert migrate.grant_roles(url) == list(ROLES)
    run(admin, *how_to_create().split("; "))
    assert migrate.grant_roles(url) == []
    assert scalar(admin, "SELECT has_table_privilege('specbatch_worker', 'completions', 'INSERT')")
    downgrade(url)  # the roles are another's: they stay, without rights here
    assert roles(admin) == len(ROLES)


def test_an_export_that_may_not_read_the_texts_is_not_in_the_log(
    login: Login, tmp_path: Path
) -> None:
    with store_of(login(OPERATOR)) as operator:
        operator.create_job(new_job())
        order = ExportOrder(ExportKind.COMPLETIONS, str(tmp_path / "all.parquet"), so_far=True)
        known = [entry.kind for entry in operator.log(JOB)]
        with pytest.raises(StoreError, match="permission denied"):
            Exporter(operator, Objects(), Objects()).export(JOB, order)
        assert [entry.kind for entry in operator.log(JOB)] == known
        time_alone = ExportOrder(ExportKind.TIME, str(tmp_path / "time.parquet"), so_far=True)
        assert Exporter(operator, Objects(), Objects()).export(JOB, time_alone).rows == 0
        assert [entry.kind for entry in operator.log(JOB)] == [*known, EntryKind.EXPORTED]
