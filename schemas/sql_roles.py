"""Rights in PostgreSQL: four group roles without login, each with the least rights it needs.

Nobody works as one of them: they are granted to logins (`GRANT specbatch_worker TO nightly`). The
tables' owner migrates and is none of them. The statements may be run again, and on databases of any
revision: what is not there is passed by. They first take from a role whatever it had on tables,
partitions, views, sequences and functions of the schema, so what stands here is all that it has.
Rights on columns must be given again when a table gets another one: every upgrade ends with
`granting()`, once, for it is some 250 statements.

What a right on a column cannot say (only together with an entry in the log, only to empty it) is
held by the triggers of `sql_triggers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from specbatch.schemas import months
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.usage import COUNTERS

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
    "acceptance_days",
    "models",
    "deployments",
    "rollouts",
    "rollout_groups",
    "pair_trials",
    "tenants",
    "tenant_budgets",
    "tenant_spending",
    "audit_log",
    "audits",
    "audit_findings",
    "worker_sessions",
    "worker_processes",
    "time_slices",
    "stage_usage",
    "reusable_outputs",
    "schedule_runs",
    "notifications",
    "draft_switches",
    "files",
    "batches",
    "api_keys",
    "staged_parts",
    "alembic_version",
)
VIEWS = ("token_record",)
_OF_A_LEASE = (
    *("stage", "generation", "lease_owner", "lease_until", "attempts", "ready_at", "last_error"),
)
_LOG_HEAD = ("log_number", "log_head")
_PINNED = ("numeric_class", "model_fingerprint", "model_parts", "proposer_fingerprint")


@dataclass(frozen=True, slots=True)
class Rights:
    """What a role may do beside reading all tables, and which columns it may not read."""

    inserts: tuple[str, ...] = ()  # tables
    inserted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of some: these columns
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # that may be updated
    deletes: tuple[str, ...] = ()  # tables
    sequences: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    hidden: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # columns not to be read


RIGHTS: Mapping[str, Rights] = {
    # Works on existing jobs. Their specs and recorded results stay unchanged.
    WORKER: Rights(
        inserts=(
            *("groups", "completions", "rejected_rows", "decisions", "machine_knowledge"),
            *("acceptance_priors", "tenants", "audit_log", "worker_sessions", "time_slices"),
            *("worker_processes", "notifications", "acceptance_days", "rollout_groups"),
            *("stage_usage", "reusable_outputs", "tenant_spending", "staged_parts"),
        ),
        deletes=(  # of those that ended; of long ago; of jobs that ended
            *("worker_processes", "acceptance_days", "staged_parts"),
        ),
        columns={
            "jobs": (
                *_OF_A_LEASE,
                *("state", "started_at", "finished_at", "error", "cancel_requested", "stop_reason"),
                *("cursor", "next_row", "ingest_done", "ingest_resumes_at", "groups_total"),
                *("groups_cut", "rows_total", "rows_rejected", "prompt_tokens", "report"),
                *_PINNED,
                *_LOG_HEAD,
            ),
            "groups": (
                *_OF_A_LEASE,
                *("rows", "prompt_tokens", "row_start", "row_stop", "cut_wanted", "rows_kept"),
                *("in_flight_usd", "drafts", "results", "waited_sec", "queue_sec", "compute_sec"),
                *("device_usd", "completions", "rows_failed", "completion_tokens", "proposed"),
                *("accepted", "verifier_passes", "cost_usd"),
                *("most_tokens", "most_row_tokens", "reserved_tokens", "charged_sec"),
            ),
            "machine_knowledge": ("state", "updated_at"),
            "acceptance_priors": ("agreed", "tested", "learned_at"),
            "acceptance_days": ("agreed", "tested"),
            "tenants": ("weight", "served", "started", "credit", "sec_per_token"),
            "tenant_spending": ("tokens", "usd"),
            "worker_sessions": (
                *("beat_at", "ended_at", "seen_ticks", "idle_ticks", "overhead_ticks"),
                *("lost_ticks", "leased_ticks", "serves"),
            ),
            "worker_processes": ("heard_at", "trouble"),
            "rollouts": ("step", "better", "worse", "outcome", "ended_at", "ended_by"),
            "notifications": ("attempts", "due_at", "sent_at", "error"),
            "time_slices": (
                *("kept", "prefill_ticks", "verify_ticks", "draft_ticks", "rejected_ticks"),
                *("padding_ticks", "overhead_ticks"),
            ),
            "stage_usage": ("kept", *COUNTERS),
            "reusable_outputs": ("job_id", "row_index", "sample_index"),
            "staged_parts": (
                *("token", "lease_until", "attempts", "rows", "rejected", "size_bytes", "sha256"),
                *("schema_version", "next_row", "next_skip"),
            ),
        },
        sequences=("decisions_id_seq", "rollout_groups_id_seq"),
        functions=(months.FUNCTION,),
    ),
    # Submits, cancels, retries, switches drafting off and on. What a group is made of and has given
    # is not its to write, nor what a job asks for once it is submitted.
    OPERATOR: Rights(
        inserts=(
            *("audit_log", "schedule_runs", "draft_switches", "models", "deployments"),
            *("rollouts", "pair_trials", "files", "batches", "api_keys", "tenant_budgets"),
        ),
        deletes=("files",),  # by their owners
        inserted={
            "jobs": (
                *("job_id", "name", "tenant", "spec", "spec_digest", "verifier", "proposer"),
                *("output_uri", "workspace_uri", "idempotency_key", "priority", "deadline_at"),
                *("budget_usd", "state", "stage", "created_at", "ready_at", "privacy"),
                *("sealed_spec", "numeric_class", "model_fingerprint", "generation"),
                *("lease_until", "attempts", "cancel_requested", "ingest_done", "next_row"),
                *("groups_total", "groups_cut", "rows_total", "rows_rejected", "prompt_tokens"),
                "report",
                *_LOG_HEAD,
            ),
        },
        columns={
            "jobs": (
                *_OF_A_LEASE,
                *("state", "cancel_requested", "error", "finished_at", "stop_reason"),
                *("deadline_at", "budget_usd", "ingest_resumes_at"),
                *_PINNED,
                *_LOG_HEAD,
            ),
            "groups": (*_OF_A_LEASE, "cut_wanted"),
            "schedule_runs": (
                *("state", "job_id", "noted_at", "reason", "attempts", "started_at", "found"),
            ),
            "acceptance_days": ("superseded",),
            "draft_switches": ("on_at", "on_by"),
            "tenant_budgets": ("ended_at", "ended_by", "end_reason"),
            "models": ("retired_at", "retired_by"),
            "deployments": ("ended_at", "ended_by", "end_reason"),
            "rollouts": ("outcome", "ended_at", "ended_by", "end_reason"),
            "pair_trials": ("pays", "reason", "figures", "tried_at", "tried_by"),
            "batches": (
                *("phase", "model", "job_id", "status", "errors", "requests", "completed"),
                *("failed", "output_file_id", "error_file_id", "in_progress_at", "cancelling_at"),
                *("finalizing_at", "ended_at", "waits_because"),
            ),
            "files": ("created_at",),  # whoever locks a row may update some column of it
            "api_keys": ("revoked_at",),
        },
        sequences=(
            *("draft_switches_id_seq", "deployments_id_seq", "rollouts_id_seq"),
            "tenant_budgets_id_seq",
        ),
        functions=(months.FUNCTION,),
        hidden={"completions": TEXTS},
    ),
    # Reads everything, and keeps what it found. Exports, and says so in the log.
    AUDITOR: Rights(
        inserts=("audits", "audit_findings", "audit_log"),
        columns={"jobs": _LOG_HEAD},
        sequences=("audits_id_seq",),
    ),
    # Empties what is kept of texts (`specbatch purge`), without seeing it, and says so in the log.
    PRIVACY: Rights(
        inserts=("audit_log",),
        deletes=("reusable_outputs",),
        columns={
            "jobs": ("purged_at", "purged_to", "sealed_spec", "last_error", *_LOG_HEAD),
            "groups": ("last_error",),
            "completions": (*TEXTS, "logprobs", "top_logprobs", "error"),
            "rejected_rows": ("row_id", "reason"),
        },
        hidden={"completions": TEXTS, "rejected_rows": ("row_id", "reason")},
    ),
}

# Who may add which entry to the log of a job.
ENTRIES: Mapping[EntryKind, tuple[str, ...]] = {
    EntryKind.SUBMITTED: (OPERATOR,),
    EntryKind.ADOPTED: ROLES,
    EntryKind.PLANNED: (WORKER,),
    EntryKind.READ: (WORKER,),
    EntryKind.PINNED: (WORKER, OPERATOR),
    EntryKind.GROUP: (WORKER,),
    EntryKind.KEPT: (WORKER,),
    EntryKind.LOST: (WORKER,),
    EntryKind.CANCELLED: (OPERATOR,),
    EntryKind.STOPPED: (WORKER,),
    EntryKind.RETRIED: (OPERATOR,),
    EntryKind.FAILED: (WORKER,),
    EntryKind.PUBLISHED: (WORKER,),
    EntryKind.PURGED: (PRIVACY,),
    EntryKind.EXPORTED: (OPERATOR, AUDITOR),
    EntryKind.REVIEWED: (OPERATOR,),
}


def how_to_create() -> str:
    """The statement for an administrator if the migration had no right to create roles."""
    return "; ".join(f"CREATE ROLE {role} NOLOGIN" for role in ROLES)


def creating_roles() -> Iterator[str]:
    """Statements that create the roles if that is allowed."""
    for role in ROLES:
        yield _CREATE.format(role=role)


def granting() -> Iterator[str]:
    """Statements that create the roles if that is allowed, and grant their rights."""
    yield from creating_roles()
    for role in ROLES:
        rights = RIGHTS[role]
        yield _REVOKE_ALL.format(role=role)
        for table in TABLES:
            if table in rights.hidden:
                names = _quoted(rights.hidden[table])
                yield _on_columns("SELECT", role, table, f"NOT IN ({names})")
            else:
                yield _grant(role, table, f"GRANT SELECT ON {table} TO {role}")
        for view in () if rights.hidden else VIEWS:  # they show the columns that are hidden
            yield _grant(role, view, f"GRANT SELECT ON {view} TO {role}")
        for table in rights.inserts:
            yield _grant(role, table, f"GRANT INSERT ON {table} TO {role}")
        for table in rights.deletes:
            yield _grant(role, table, f"GRANT DELETE ON {table} TO {role}")
        for verb, of_tables in (("INSERT", rights.inserted), ("UPDATE", rights.columns)):
            for table, columns in of_tables.items():
                yield _on_columns(verb, role, table, f"IN ({_quoted(columns)})")
        for sequence in rights.sequences:
            yield _grant(role, sequence, f"GRANT USAGE ON SEQUENCE {sequence} TO {role}")
        for function in rights.functions:
            yield _grant(role, function, f"GRANT EXECUTE ON FUNCTION {function} TO {role}")


def revoking() -> Iterator[str]:
    """Statements that revoke the rights and drop roles without members or other uses."""
    for role in ROLES:
        for table in (*TABLES, *VIEWS):
            yield _grant(role, table, f"REVOKE ALL ON {table} FROM {role}")
        for sequence in RIGHTS[role].sequences:
            yield _grant(role, sequence, f"REVOKE ALL ON SEQUENCE {sequence} FROM {role}")
        for function in RIGHTS[role].functions:
            yield _grant(role, function, f"REVOKE ALL ON FUNCTION {function} FROM {role}")
        yield _DROP.format(role=role)


def showing_texts() -> Iterator[str]:
    """Statements that let every role read whole tables, as before columns were hidden."""
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


# On whatever lies in the schema: also what nobody here would think of granting. Rights on a table
# take those on its columns with them. Objects of other owners are theirs to grant.
_REVOKE_ALL = """
DO $$ DECLARE one record; BEGIN
  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{role}') THEN RETURN; END IF;
  FOR one IN
    SELECT CASE WHEN relkind = 'S' THEN 'SEQUENCE ' ELSE 'TABLE ' END || oid::regclass AS named
      FROM pg_class
      WHERE relnamespace = current_schema()::regnamespace
        AND relkind IN ('r', 'p', 'v', 'm', 'f', 'S') AND pg_has_role(relowner, 'USAGE')
    UNION ALL
    SELECT 'ROUTINE ' || oid::regprocedure FROM pg_proc
      WHERE pronamespace = current_schema()::regnamespace AND pg_has_role(proowner, 'USAGE')
  LOOP
    EXECUTE 'REVOKE ALL ON ' || one.named || ' FROM {role} CASCADE';
  END LOOP;
EXCEPTION WHEN insufficient_privilege THEN NULL;
END $$"""

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
