"""Who may do what in PostgreSQL: four group roles without login, with the least that each needs.

Nobody works as one of them: they are granted to logins (`GRANT specbatch_worker TO nightly`). The
tables' owner migrates and is none of them. The statements may be run again, and on databases of any
revision: what is not there is passed by. Rights on some columns of a table must be given again when
it gets another one: a migration that adds a column to `completions` ends with `granting()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from specbatch.schemas import months

WORKER, OPERATOR, AUDITOR = "specbatch_worker", "specbatch_operator", "specbatch_auditor"
PRIVACY = "specbatch_privacy"
ROLES = (WORKER, OPERATOR, AUDITOR, PRIVACY)

# Columns of `completions` that are texts, or that texts can be made of.
TEXTS = ("row_id", "text", "token_ids", "top_token_ids", "rejected")

# alembic_version too: every command looks there whether the tables are those it knows.
TABLES = (
    "jobs",
    "groups",
    "completions",
    "rejected_rows",
    "decisions",
    "machine_knowledge",
    "acceptance_priors",
    "tenants",
    "audit_log",
    "audits",
    "audit_findings",
    "worker_sessions",
    "worker_processes",
    "time_slices",
    "schedule_runs",
    "alembic_version",
)
VIEWS = ("token_record",)
_OF_A_LEASE = (
    *("stage", "generation", "lease_owner", "lease_until", "attempts", "ready_at", "last_error"),
)


@dataclass(frozen=True, slots=True)
class Rights:
    """Beside reading all tables: what a role may do to some of them, and what it may not see."""

    tables: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # that may be updated
    sequences: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    hidden: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # columns not to be read


RIGHTS: Mapping[str, Rights] = {
    # Does jobs that are there. What it has recorded stays as it is: no UPDATE, no DELETE. The audit
    # log is nobody's to change: who does something to a job may add what it was.
    WORKER: Rights(
        tables={
            "jobs": "UPDATE",
            "groups": "INSERT, UPDATE",
            "completions": "INSERT",
            "rejected_rows": "INSERT",
            "decisions": "INSERT",
            "machine_knowledge": "INSERT, UPDATE",
            "acceptance_priors": "INSERT, UPDATE",
            "tenants": "INSERT, UPDATE",
            "audit_log": "INSERT",
            "worker_sessions": "INSERT, UPDATE",
            "worker_processes": "INSERT, UPDATE, DELETE",
            "time_slices": "INSERT, UPDATE",
        },
        sequences=("decisions_id_seq",),
        functions=(months.FUNCTION,),
    ),
    # Submits, cancels, retries, sets shares. What a group is made of and has given is not its to
    # write, nor what a job asks for once it is submitted.
    OPERATOR: Rights(
        tables={
            "jobs": "INSERT",
            "tenants": "INSERT, UPDATE",
            "audit_log": "INSERT",
            "schedule_runs": "INSERT, UPDATE",
        },
        columns={
            "jobs": (
                *_OF_A_LEASE,
                *("state", "cancel_requested", "error", "finished_at", "stop_reason"),
                *("priority", "deadline_at", "budget_usd", "ingest_resumes_at", "numeric_class"),
                *("model_fingerprint", "model_parts", "proposer_fingerprint"),
                *("log_number", "log_head"),
            ),
            "groups": (*_OF_A_LEASE, "cut_wanted"),
        },
        functions=(months.FUNCTION,),
        hidden={"completions": TEXTS},
    ),
    # Reads everything, and keeps what it found.
    AUDITOR: Rights(
        tables={"audits": "INSERT", "audit_findings": "INSERT"}, sequences=("audits_id_seq",)
    ),
    # Empties what is kept of texts (`specbatch purge`), without seeing it, and says so in the log.
    PRIVACY: Rights(
        tables={"audit_log": "INSERT"},
        columns={
            "jobs": (
                *("purged_at", "purged_to", "sealed_spec", "last_error"),
                *("log_number", "log_head"),
            ),
            "groups": ("last_error",),
            "completions": (*TEXTS, "logprobs", "top_logprobs", "error"),
            "rejected_rows": ("row_id", "reason"),
        },
        hidden={"completions": TEXTS},
    ),
}


def how_to_create() -> str:
    """What somebody with the right to create roles runs where the migration had none."""
    return "; ".join(f"CREATE ROLE {role} NOLOGIN" for role in ROLES)


def granting() -> Iterator[str]:
    """Statements that create the roles, where that is allowed, and give them their rights."""
    for role in ROLES:
        yield _CREATE.format(role=role)
        rights = RIGHTS[role]
        for table in TABLES:
            if table not in rights.hidden:
                yield _grant(role, table, f"GRANT SELECT ON {table} TO {role}")
                continue
            yield _grant(role, table, f"REVOKE SELECT ON {table} FROM {role}")
            names = _quoted(rights.hidden[table])
            yield _on_columns("SELECT", role, table, f"NOT IN ({names})")
        for view in VIEWS:  # they show the columns that are hidden
            verb = "REVOKE SELECT ON {} FROM {}" if rights.hidden else "GRANT SELECT ON {} TO {}"
            yield _grant(role, view, verb.format(view, role))
        for table, verbs in rights.tables.items():
            yield _grant(role, table, f"GRANT {verbs} ON {table} TO {role}")
        for table, columns in rights.columns.items():
            yield _on_columns("UPDATE", role, table, f"IN ({_quoted(columns)})")
        for sequence in rights.sequences:
            yield _grant(role, sequence, f"GRANT USAGE ON SEQUENCE {sequence} TO {role}")
        for function in rights.functions:
            yield _grant(role, function, f"GRANT EXECUTE ON FUNCTION {function} TO {role}")


def revoking() -> Iterator[str]:
    """Statements that take the rights back, and drop roles that nobody has or needs elsewhere."""
    for role in ROLES:
        for table in (*TABLES, *VIEWS):
            yield _grant(role, table, f"REVOKE ALL ON {table} FROM {role}")
        for sequence in RIGHTS[role].sequences:
            yield _grant(role, sequence, f"REVOKE ALL ON SEQUENCE {sequence} FROM {role}")
        for function in RIGHTS[role].functions:
            yield _grant(role, function, f"REVOKE ALL ON FUNCTION {function} FROM {role}")
        yield _DROP.format(role=role)


def showing_texts() -> Iterator[str]:
    """Statements that let every role read whole tables, as before there were hidden columns."""
    for role, rights in RIGHTS.items():
        for table in (*rights.hidden, *VIEWS):
            yield _grant(role, table, f"GRANT SELECT ON {table} TO {role}")


def _on_columns(verb: str, role: str, table: str, which: str) -> str:
    return _GRANT_COLUMNS.format(verb=verb, role=role, table=table, which=which)


def _quoted(columns: tuple[str, ...]) -> str:
    return ", ".join(f"'{column}'" for column in columns)


def _grant(role: str, target: str, statement: str) -> str:
    find = "to_regprocedure" if target.endswith(")") else "to_regclass"
    return _GRANT.format(role=role, find=find, target=target, statement=statement)


# Roles belong to the whole server, so another database's migration may make them meanwhile.
_CREATE = """
DO $$ BEGIN
  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{role}') THEN
    CREATE ROLE {role} NOLOGIN;
  END IF;
EXCEPTION WHEN insufficient_privilege OR duplicate_object OR unique_violation THEN NULL;
END $$"""

_GRANT = """
DO $$ BEGIN
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = '{role}')
      AND {find}('{target}') IS NOT NULL THEN
    EXECUTE '{statement}';
  END IF;
EXCEPTION WHEN insufficient_privilege THEN NULL;
END $$"""

_GRANT_COLUMNS = """
DO $$ DECLARE named text; BEGIN
  SELECT string_agg(quote_ident(attname), ', ') INTO named FROM pg_attribute
    WHERE attrelid = to_regclass('{table}') AND attnum > 0 AND NOT attisdropped
      AND attname {which};
  IF named IS NOT NULL AND EXISTS (SELECT FROM pg_roles WHERE rolname = '{role}') THEN
    EXECUTE 'GRANT {verb} (' || named || ') ON {table} TO {role}';
  END IF;
EXCEPTION WHEN insufficient_privilege THEN NULL;
END $$"""

_DROP = """
DO $$ BEGIN
  IF NOT EXISTS (
    SELECT FROM pg_auth_members JOIN pg_roles ON pg_roles.oid = roleid WHERE rolname = '{role}'
  ) THEN
    DROP ROLE IF EXISTS {role};
  END IF;
EXCEPTION WHEN insufficient_privilege OR dependent_objects_still_exist THEN NULL;
END $$"""
