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

from specbatch.pipeline.ledger.sql.transactions import explain
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

    def submitted(self, output: str, verifier: Path | None = None) -> str:
        """The id of a job that an operator submits."""
        arguments = ("--input", "in.parquet", "--output", output, "--max-tokens", "4")
        arguments += ("--reuse-outputs",)  # answers are kept, copied and purged
        model = ("--verifier", str(verifier or self.models.verifier))
        told = command(
            *("submit-job", *arguments, *model),
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


@pytest.fixture(scope="module")
def ongoing(here: Installation) -> str:
    """The id of a job that has not ended: no worker has its model."""
    return here.submitted("later", verifier=here.models.draft)


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
    here: Installation, ongoing: str, role: str, own: str, foreign: str
) -> None:
    names = ("host-7:4711", "alice@laptop")
    mine, others = names if role == "worker" else names[::-1]
    for kind in own.split():
        assert here.may(role, *entry(ongoing, kind, mine)), kind
        assert not here.may(role, *entry(ongoing, kind, others)), kind
    for kind in foreign.split():
        assert not here.may(role, *entry(ongoing, kind, mine)), kind


def test_an_entry_follows_the_last_one_and_comes_with_the_head(
    here: Installation, ongoing: str
) -> None:
    kind, who = "lost", "host-7:4711"
    both = entry(ongoing, kind, who)
    assert here.may("worker", *both)
    assert not here.may("worker", both[0]), "without the head"
    assert not here.may("worker", both[1]), "without the entry"
    assert not here.may("worker", *entry(ongoing, kind, who, previous="sha256('another')"))
    assert not here.may("worker", entry(ongoing, kind, who, further=2)[0])


def updated(entries: tuple[str, str], change: str) -> tuple[str, str]:
    """The same statements, which change something else of the job's row with its head."""
    return entries[0], entries[1].replace("SET ", f"SET {change}, ")


# Another value for a column of each type.
FORGED = {
    "boolean": "NOT coalesce({}, false)",
    "integer": "coalesce({}, 0) + 1",
    "bigint": "coalesce({}, 0) + 1",
    "double precision": "coalesce({}, 0) + 1",
    "text": "coalesce({}, '') || 'x'",
    "character varying": "coalesce({}, '') || 'x'",
    "json": "json_build_object('forged', {})",
    "jsonb": "jsonb_build_object('forged', {})",
    "bytea": "sha256('forged')",
}


def forgeries(here: Installation, table: str) -> dict[str, str]:
    """For each column of the table that a worker may write at all: a change of it."""
    decided = [line.split() for line in DECIDED.read_text().splitlines()[1:]]
    may = {line[0].split(".")[1] for line in decided if line[0].startswith(f"{table}.")
           and "u" in line[1]}  # fmt: skip
    types = rows(
        here.owner,
        "SELECT column_name, data_type FROM information_schema.columns"
        f" WHERE table_name = '{table}'",
    )
    return {
        str(name): f"{name} = {FORGED[str(of)].format(name)}" for name, of in types if name in may
    }


def test_a_worker_leaves_a_job_that_has_ended_as_it_is(here: Installation, done: str) -> None:
    """Each column that it may write of others: with an entry in the log, and without one."""
    changes = forgeries(here, "jobs")
    assert len(changes) > 20
    for column, change in changes.items():
        assert not here.may("worker", f"UPDATE jobs SET {change} WHERE job_id = '{done}'"), change
        for kind in ("lost", "pinned", "published", "failed", "adopted"):
            if not column.startswith("log_"):
                both = updated(entry(done, kind, "host-7:4711"), change)
                assert not here.may("worker", *both), change
    sent_back = ("state = 'running'", "state = 'running', finished_at = NULL, stage = 'run'")
    for change in sent_back:
        assert not here.may("worker", *updated(entry(done, "lost", "host-7:4711"), change))
    assert not here.may("worker", *entry(done, "lost", "host-7:4711")), "nor its log"


def test_a_worker_leaves_a_group_that_has_ended_as_it_is(here: Installation, done: str) -> None:
    changes = forgeries(here, "groups")
    assert {"cost_usd", "device_usd", "completion_tokens", "stage", "results"} <= set(changes)
    for change in changes.values():
        assert not here.may("worker", f"UPDATE groups SET {change} WHERE job_id = '{done}'"), change


def test_device_time_is_never_less(here: Installation, done: str) -> None:
    """More of it may come late, from a worker whose session is open."""
    where = f"WHERE job_id = '{done}'"
    assert int(str(here.value(f"SELECT sum(verify_ticks) FROM time_slices {where}"))) > 0
    for change in ("verify_ticks = 0", "prefill_ticks = prefill_ticks - 1", "kept = false"):
        assert not here.may("worker", f"UPDATE time_slices SET {change} {where}"), change
    assert here.may("worker", f"UPDATE time_slices SET verify_ticks = verify_ticks + 1 {where}")


def test_a_job_ends_with_the_entry_that_says_so(here: Installation, ongoing: str) -> None:
    end = "state = 'done', finished_at = 1"
    for kind in ("lost", "group", "pinned"):
        assert not here.may("worker", *updated(entry(ongoing, kind, "host-7:4711"), end)), kind
    assert here.may("worker", *updated(entry(ongoing, "published", "host-7:4711"), end))


def test_an_ended_job_changes_with_an_entry_of_an_operator_alone(
    here: Installation, done: str
) -> None:
    for change in ("error = 'forged'", "finished_at = 1", "deadline_at = 1", "attempts = 7"):
        assert not here.may("operator", f"UPDATE jobs SET {change} WHERE job_id = '{done}'"), change
    again = "state = 'running', finished_at = NULL"
    assert here.may("operator", *updated(entry(done, "retried", "alice@laptop"), again))
    assert not here.may("operator", *updated(entry(done, "exported", "alice@laptop"), again))


def test_a_refusal_of_an_actor_names_the_setting(here: Installation) -> None:
    """Whoever is called as a worker is would be taken for one, and no other login would help."""
    said = forks.run(
        *("specbatch", "submit-job", "--input", "in.parquet", "--output", "no"),
        *("--verifier", str(here.models.verifier)),
        environment=here.environment("operator") | {"SPECBATCH_ACTOR": "ci:42"},
        cwd=here.folder, timeout=200,
    )  # fmt: skip
    assert said.returncode != 0
    assert "SPECBATCH_ACTOR" in said.stderr
    assert "use a login" not in said.stderr
    assert said.stderr.count("error:") == 1


def test_what_a_trigger_refuses_is_not_taken_for_a_right_that_is_missing(
    here: Installation, done: str
) -> None:
    """The remedy for those is another login."""
    with psycopg.connect(here.logins["worker"]) as connection:
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as refused:
            connection.execute(f"UPDATE jobs SET attempts = 7 WHERE job_id = '{done}'".encode())
        told = explain(refused.value, "here")
    assert "table jobs: a job that has ended stays as it is for workers" in told
    assert "login" not in told


def test_who_purges_writes_no_text(here: Installation, done: str) -> None:
    empty = "text = '', row_id = '', token_ids = '{}', logprobs = '{}'"
    more = "error = NULL, top_token_ids = NULL, top_logprobs = NULL, rejected = NULL"
    everything = f"UPDATE completions SET {empty}, {more}"
    assert not here.may("privacy", everything), "of a job that is not purged"
    purged = entry(done, "purged", "alice@laptop")
    at = "purged_at = 1, purged_to = 0"
    for kind in ("adopted", "exported"):
        assert not here.may("privacy", *updated(entry(done, kind, "alice@laptop"), at)), kind
    both = updated(purged, at)
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
    copies = f"SELECT count(reused_from) FROM completions WHERE job_id = '{stopped}'"
    assert here.value(copies) == 6, "the retried job asks what the first one asked"
    answers = f"SELECT count(*) FROM reusable_outputs WHERE job_id = '{done}'"
    assert here.value(answers) == 1, "all prompts are the same"
    assert "intact" in here.says("auditor", "audit", done, "--sample", "0")
    here.says("auditor", "export", done, "--what", "completions", "--to", "all.parquet")
    assert pq.read_table(here.folder / "all.parquet").num_rows == 6
    here.says("worker", "export", done, "--what", "completions", "--to", "x.parquet", code=4)
    here.says("privacy", "purge", "--job", stopped)
    assert here.value(f"SELECT max(text) FROM completions WHERE job_id = '{stopped}'") == ""
    here.says("privacy", "purge", "--job", done)
    assert here.value(answers) == 0
    for job in (done, stopped):
        assert "intact" in here.says("auditor", "audit", job, "--sample", "0")
        assert "NOT" not in here.says("auditor", "audit", job, "--sample", "0")


def test_nobody_purges_a_job_that_has_not_ended(here: Installation, ongoing: str) -> None:
    at = "purged_at = 1, purged_to = 0"
    assert not here.may("privacy", *updated(entry(ongoing, "purged", "alice@laptop"), at))


def test_migrating_again_takes_back_what_was_granted_beside_it(here: Installation) -> None:
    """As an installation of an earlier version has it, and what was granted by hand."""
    month = here.value(
        "SELECT relname FROM pg_class WHERE relispartition AND relkind = 'r' LIMIT 1"
    )
    beside = (
        f"has_table_privilege('specbatch_worker', '{month}', 'UPDATE')"
        " OR has_sequence_privilege('specbatch_operator', 'audits_id_seq', 'USAGE')"
        " OR has_function_privilege('specbatch_auditor', 'made_by_hand()', 'EXECUTE')"
    )
    with psycopg.connect(here.owner, autocommit=True) as connection:
        connection.execute("GRANT UPDATE ON jobs, completions TO specbatch_worker")
        connection.execute(f"GRANT ALL ON {month} TO specbatch_worker".encode())
        connection.execute("GRANT ALL ON SEQUENCE audits_id_seq TO specbatch_operator")
        connection.execute("CREATE FUNCTION made_by_hand() RETURNS int RETURN 1")
        connection.execute("REVOKE ALL ON FUNCTION made_by_hand() FROM PUBLIC")
        connection.execute("GRANT ALL ON FUNCTION made_by_hand() TO specbatch_auditor")
    assert here.value(f"SELECT {beside}") is True
    assert here.may("worker", "UPDATE completions SET tag = NULL WHERE false")
    for _ in range(2):
        said = forks.run(
            *("specbatch", "migrate"),
            environment={"SPECBATCH_DATABASE_URL": here.owner}, cwd=here.folder, timeout=120,
        )  # fmt: skip
        assert said.returncode == 0, said.stderr
        assert "\n".join(decisions(here.owner)) + "\n" == DECIDED.read_text()
        assert here.value(f"SELECT {beside}") is False
