"""What each SQL role may do in PostgreSQL: column by column, and after a job that ran as the roles.

`sql_rights.txt` beside this file holds a decision for every column and role. A new column is one
that nobody has decided on: it fails `test_every_right_is_one_that_was_decided_on`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import make_url

from support import forks
from support.models import TinyPair
from support.servers import PrivatePostgres, PrivateRedis
from support.workers import command, wait_until, worker

ROLES = ("worker", "operator", "auditor", "privacy")
VERBS = ("SELECT", "INSERT", "UPDATE")
PASSWORD = "long-enough-to-be-one"
DECIDED = Path(__file__).with_name("sql_rights.txt")
COLUMNS = """
SELECT relname, attname FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v') AND NOT relispartition
  AND attnum > 0 AND NOT attisdropped AND relname NOT LIKE 'pg_%' ORDER BY relname, attname"""


@dataclass(frozen=True)
class Installation:
    """A database that `specbatch migrate` made, a login of each role, and a folder to work in."""

    owner: str
    logins: Mapping[str, str]
    folder: Path
    broker: str
    models: TinyPair

    def environment(self, role: str) -> dict[str, str]:
        return {
            "SPECBATCH_DATABASE_URL": self.logins[role],
            "SPECBATCH_BROKER_URL": self.broker,
            "SPECBATCH_WORKSPACE": str(self.folder / "data"),
            "SPECBATCH_SWEEP_INTERVAL_SEC": "0.5",
        }

    def says(self, role: str, *arguments: str, code: int = 0) -> str:
        """What a command prints for a login of this role."""
        done = forks.run(
            *("specbatch", *arguments),
            environment=self.environment(role), cwd=self.folder, timeout=200,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submitted(self, output: str, *more: str) -> str:
        """The id of a job that an operator submits."""
        arguments = ("--input", "in.parquet", "--output", output, "--max-tokens", "4")
        model = ("--verifier", str(self.models.verifier))
        told = command(
            *("submit-job", *arguments, *model, *more),
            environment=self.environment("operator"), cwd=self.folder,
        )  # fmt: skip
        return str(told["job"])

    def may(self, role: str, *statements: str) -> bool:
        """Whether the server lets the role do this, in one transaction, which is taken back."""
        with psycopg.connect(self.logins[role].replace("+psycopg", "")) as connection:
            try:
                for statement in statements:
                    connection.execute(statement.encode())
                connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
            except psycopg.errors.InsufficientPrivilege:
                return False
            finally:
                connection.rollback()
        return True

    def value(self, query: str) -> object:
        return rows(self.owner, query)[0][0]


def rows(url: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        return connection.execute(query.encode()).fetchall()


@pytest.fixture(scope="module")
def here(
    postgres_server: PrivatePostgres,
    redis_server: PrivateRedis,
    tiny_pair: TinyPair,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Installation]:
    folder = tmp_path_factory.mktemp("roles")
    owner = postgres_server.create_database()
    prompts = pa.table({"id": [f"r{i}" for i in range(6)], "prompt": ["a few words"] * 6})
    pq.write_table(prompts, folder / "in.parquet")
    first = forks.run(
        *("specbatch", "migrate"),
        environment={"SPECBATCH_DATABASE_URL": owner}, cwd=folder, timeout=120,
    )  # fmt: skip
    assert first.returncode == 0, first.stderr
    logins = {}
    with psycopg.connect(owner, autocommit=True) as connection:
        for role in ROLES:
            name = f"alone_{role}"
            connection.execute(
                f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}' IN ROLE specbatch_{role}".encode()
            )
            url = make_url(owner).set(username=name, password=PASSWORD)
            logins[role] = url.render_as_string(hide_password=False)
    broker = redis_server.url_of(redis_server.databases - 1)
    yield Installation(owner, logins, folder, broker, tiny_pair)
    postgres_server.drop_database(owner)
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        for role in ROLES:
            connection.execute(f"DROP ROLE alone_{role}".encode())


@pytest.fixture(scope="module")
def done(here: Installation) -> str:
    """The id of a job that an operator submitted and a worker did."""
    job_id = here.submitted("out")
    models = ("--verifier", str(here.models.verifier))
    with worker("all", *models, environment=here.environment("worker"), cwd=here.folder) as one:
        state = f"SELECT state FROM jobs WHERE job_id = '{job_id}'"
        wait_until("it is done", lambda: here.value(state) == "done", [one])
        one.end()
    return job_id


def test_every_right_is_one_that_was_decided_on(here: Installation) -> None:
    held = "\n".join(decisions(here.owner)) + "\n"
    assert held == DECIDED.read_text(), (
        "decide in schemas/sql_roles.py what each role may do with the column, then write it down "
        f"in {DECIDED.name}"
    )


def decisions(url: str) -> Iterator[str]:
    """A line for each column in the live catalog: what each role may do with it."""
    yield "# table.column: what a worker, an operator, an auditor and who purges may do with it"
    for table, column in rows(url, COLUMNS):
        rights = []
        for role in ROLES:
            asked = (f"has_column_privilege('specbatch_{role}', '{table}', '{column}', '{verb}')"
                     for verb in VERBS)  # fmt: skip
            has = rows(url, f"SELECT {', '.join(asked)}")[0]
            rights.append(
                "".join(v[0].lower() if h else "-" for v, h in zip(VERBS, has, strict=True))
            )
        yield f"{f'{table}.{column}':40} {' '.join(rights)}"


@pytest.mark.parametrize("role", ROLES)
def test_the_server_refuses_what_was_not_decided(here: Installation, role: str) -> None:
    """The decisions once more, by trying to update every column as the role."""
    lines = [line.split() for line in DECIDED.read_text().splitlines()[1:]]
    decided = {line[0]: "u" in line[1 + ROLES.index(role)] for line in lines}
    there = {f"{table}.{column}" for table, column in rows(here.owner, COLUMNS)}
    tables = {
        name: may
        for name, may in decided.items()
        if name in there and not name.startswith("token_record.")
    }
    done = {}
    with psycopg.connect(here.logins[role], autocommit=True) as connection:
        for name in tables:
            table, column = name.split(".")
            try:
                connection.execute(f"UPDATE {table} SET {column} = DEFAULT WHERE false".encode())
                done[name] = True
            except psycopg.errors.InsufficientPrivilege:
                done[name] = False
    assert done == tables


@pytest.mark.parametrize("column", ["spec", "output_uri", "workspace_uri", "verifier", "privacy"])
def test_what_a_job_asks_for_stays_as_it_was_submitted(
    here: Installation, done: str, column: str
) -> None:
    forged = f"""UPDATE jobs SET {column} = '"forged"' WHERE job_id = '{done}'"""
    assert not [role for role in ROLES if here.may(role, forged)]


def test_a_worker_rewrites_no_head_of_a_log(here: Installation, done: str) -> None:
    for change in (
        "log_head = sha256('forged')",
        "log_number = log_number - 1, log_head = (SELECT hash FROM audit_log AS a"
        " WHERE a.job_id = jobs.job_id AND number = log_number - 1)",
        "log_number = 0, log_head = NULL",
        "log_number = log_number + 1",
    ):
        for role in ("worker", "operator"):
            assert not here.may(role, f"UPDATE jobs SET {change} WHERE job_id = '{done}'"), change


ENTRY = """
INSERT INTO audit_log (job_id, number, kind, at, actor, payload, previous, hash)
SELECT job_id, log_number + {further}, '{kind}', 0, '{actor}', '{{}}', {previous}, sha256('new')
FROM jobs WHERE job_id = '{job}'"""
HEAD = "UPDATE jobs SET log_number = log_number + 1, log_head = sha256('new') WHERE job_id = '{}'"


def entry(
    job: str, kind: str, actor: str, previous: str = "log_head", further: int = 1
) -> tuple[str, str]:
    """Statements that add an entry to the log, with the head."""
    made = ENTRY.format(job=job, kind=kind, actor=actor, previous=previous, further=further)
    return made, HEAD.format(job)


@pytest.mark.parametrize(
    ("role", "own", "foreign"),
    [
        ("worker", "group lost published", "submitted cancelled retried purged exported"),
        ("operator", "cancelled retried exported", "group planned read published purged"),
        ("auditor", "exported", "submitted group published purged"),
        ("privacy", "purged", "submitted group published cancelled exported"),
    ],
)
def test_a_role_writes_its_own_kinds_of_entries_in_its_own_name(
    here: Installation, done: str, role: str, own: str, foreign: str
) -> None:
    names = ("host-7:4711", "alice@laptop")
    mine, others = names if role == "worker" else names[::-1]
    for kind in own.split():
        assert here.may(role, *entry(done, kind, mine)), kind
        assert not here.may(role, *entry(done, kind, others)), kind
    for kind in foreign.split():
        assert not here.may(role, *entry(done, kind, mine)), kind


def test_an_entry_follows_the_last_one_and_comes_with_the_head(
    here: Installation, done: str
) -> None:
    kind, who = "lost", "host-7:4711"
    both = entry(done, kind, who)
    assert here.may("worker", *both)
    assert not here.may("worker", both[0]), "without the head"
    assert not here.may("worker", both[1]), "without the entry"
    assert not here.may("worker", *entry(done, kind, who, previous="sha256('another')"))
    assert not here.may("worker", entry(done, kind, who, further=2)[0])


def test_a_worker_leaves_a_job_that_has_ended_as_it_is(here: Installation, done: str) -> None:
    for change in (
        "state = 'running', finished_at = NULL",
        "report = '{}'",
        "report = (report::jsonb || '{\"steps\": 1}')::json",
        "numeric_class = 'exact/f32/999'",
        "model_fingerprint = 'forged'",
        "cancel_requested = true",
        "stop_reason = 'forged'",
    ):
        assert not here.may("worker", f"UPDATE jobs SET {change} WHERE job_id = '{done}'"), change
        moved = entry(done, "pinned", "host-7:4711")
        if "numeric" in change or "fingerprint" in change:
            both = moved[1].replace("SET ", f"SET {change}, ")
            assert not here.may("worker", moved[0], both), "what is pinned stays"


def test_who_purges_writes_no_text(here: Installation, done: str) -> None:
    empty = "text = '', row_id = '', token_ids = '{}', logprobs = '{}'"
    more = "error = NULL, top_token_ids = NULL, top_logprobs = NULL, rejected = NULL"
    everything = f"UPDATE completions SET {empty}, {more}"
    assert not here.may("privacy", everything), "of a job that is not purged"
    purged = entry(done, "purged", "alice@laptop")
    both = (purged[0], purged[1].replace("SET ", "SET purged_at = 1, purged_to = 0, "))
    assert here.may("privacy", *both, everything), "the same of one that is"
    with rejected_row(here, done):
        for forged in (
            everything.replace("text = ''", "text = 'forged'"),
            everything.replace("error = NULL", "error = 'forged'"),
            everything.replace("token_ids = '{}'", "token_ids = '{7}'"),
            "UPDATE rejected_rows SET row_id = NULL, reason = 'forged'",
            "UPDATE groups SET last_error = 'forged'",
            f"UPDATE jobs SET last_error = 'forged' WHERE job_id = '{done}'",
            f"UPDATE jobs SET sealed_spec = 'forged' WHERE job_id = '{done}'",
        ):
            assert not here.may("privacy", *both, forged), forged


@contextmanager
def rejected_row(here: Installation, job: str) -> Iterator[None]:
    """A quarantined row of a job that had none."""
    values = f"'{job}', 99, 'bad_id', 'x'"
    columns = "job_id, row_index, code, reason"
    rows(here.owner, f"INSERT INTO rejected_rows ({columns}) VALUES ({values}) RETURNING 1")
    try:
        yield
    finally:
        rows(here.owner, "DELETE FROM rejected_rows WHERE row_index = 99 RETURNING 1")


def test_a_temporary_table_is_not_taken_for_the_log(here: Installation, done: str) -> None:
    shadow = (
        "CREATE TEMPORARY TABLE audit_log AS SELECT * FROM public.audit_log",
        f"INSERT INTO audit_log SELECT job_id, 999, kind, at, actor, payload, previous,"
        f" sha256('new') FROM public.audit_log WHERE job_id = '{done}' AND number = 1",
        "UPDATE public.jobs SET log_number = 999, log_head = sha256('new')"
        f" WHERE job_id = '{done}'",
    )
    assert not here.may("worker", *shadow)


def test_every_command_works_for_the_role_that_it_is_for(here: Installation, done: str) -> None:
    assert done in here.says("operator", "jobs")
    here.says("operator", "show", done)
    stopped = here.submitted("stopped")
    here.says("operator", "cancel", stopped)
    models = ("--verifier", str(here.models.verifier))
    with worker("all", *models, environment=here.environment("worker"), cwd=here.folder) as one:
        state = "SELECT state FROM jobs WHERE job_id = '{}'"
        ended = state.format(stopped)
        wait_until("it is stopped", lambda: here.value(ended) == "cancelled", [one])
        here.says("operator", "retry", stopped)
        wait_until("it is done", lambda: here.value(ended) == "done", [one])
        one.end()
    assert "intact" in here.says("auditor", "audit", done, "--sample", "0")
    here.says("auditor", "export", done, "--what", "completions", "--to", "all.parquet")
    assert pq.read_table(here.folder / "all.parquet").num_rows == 6
    here.says("worker", "export", done, "--what", "completions", "--to", "x.parquet", code=4)
    here.says("privacy", "purge", "--job", stopped)
    assert here.value(f"SELECT max(text) FROM completions WHERE job_id = '{stopped}'") == ""
    for job in (done, stopped):
        assert "intact" in here.says("auditor", "audit", job, "--sample", "0")
        assert "NOT" not in here.says("auditor", "audit", job, "--sample", "0")


def test_migrating_again_takes_back_what_was_granted_beside_it(here: Installation) -> None:
    """As an installation of an earlier version has it: rights on whole tables."""
    with psycopg.connect(here.owner, autocommit=True) as connection:
        connection.execute("GRANT UPDATE ON jobs, completions TO specbatch_worker")
    assert here.may("worker", "UPDATE completions SET tag = NULL WHERE false")
    for _ in range(2):
        said = forks.run(
            *("specbatch", "migrate"),
            environment={"SPECBATCH_DATABASE_URL": here.owner}, cwd=here.folder, timeout=120,
        )  # fmt: skip
        assert said.returncode == 0, said.stderr
        assert "\n".join(decisions(here.owner)) + "\n" == DECIDED.read_text()
