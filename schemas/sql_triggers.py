"""Triggers that restrict the roles of `sql_roles.py` where a right on a column is too wide.

- An entry of the audit log follows the last one, is of a kind that the role may write, and names an
  actor of the role's: workers are called `host:process`, people anything else.
- A job's head is its log's last entry, at the end of every transaction that touches one of them.
- What a job is verified with, its limits, its stop and its end change only together with an entry.
- Workers pin a job's models and class once; a report loses nothing, and ends with its job.
- Jobs and groups that have ended stay as they are for workers, with an entry or without one. Device
  time that is reported late may still grow.
- A job is purged with the entry that says so. Who may write texts but not read them may only empty
  them, and only of a job that is purged.

The tables' owner is not held to it, for it could drop the triggers; neither is who has none of the
roles. Their functions have a search path of their own, for a caller's temporary table must not be
taken for ours. SQLite has no roles, and none of this.
"""

from __future__ import annotations

from collections.abc import Iterator

from specbatch.schemas.audit import FIRST, EntryKind
from specbatch.schemas.provenance import Ticks
from specbatch.schemas.records import JobState, Stage
from specbatch.schemas.sql_roles import AUDITOR, ENTRIES, OPERATOR, PRIVACY, ROLES, WORKER
from specbatch.schemas.usage import COUNTERS

_ENDS = "ARRAY[" + ", ".join(f"'{state.value}'" for state in JobState if state.is_final) + "]"
_CLOSED = f"('{Stage.DONE.value}', '{Stage.FAILED.value}', '{Stage.CANCELLED.value}')"
_TURNING = (
    f"('{EntryKind.PUBLISHED.value}', '{EntryKind.FAILED.value}', '{EntryKind.RETRIED.value}', "
    f"'{EntryKind.REVIEWED.value}')"
)
# What auditors and who purges write of a job that has ended; their other rights say how.
_AFTER_THE_END = (
    "ARRAY['log_number', 'log_head', 'purged_at', 'purged_to', 'sealed_spec', 'last_error']"
)
_SHRINKS = " OR ".join(f"NEW.{kind}_ticks < OLD.{kind}_ticks" for kind in Ticks.__slots__)
_USE_SHRINKS = " OR ".join(f"NEW.{name} < OLD.{name}" for name in COUNTERS)
_DOERS = f"ARRAY['{WORKER}', '{OPERATOR}']"
_PEOPLE = f"ARRAY['{OPERATOR}', '{AUDITOR}', '{PRIVACY}']"
_KINDS = " ".join(
    f"WHEN '{kind.value}' THEN ARRAY[{', '.join(map(repr, roles))}]"
    for kind, roles in ENTRIES.items()
)

# Those of the roles that hold the current user; NULL: nothing here does.
_BOUND = f"""
CREATE OR REPLACE FUNCTION specbatch_bound(of_table oid) RETURNS text[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $body$
  SELECT array_agg(rolname::text) FROM pg_roles
  WHERE rolname IN ({", ".join(map(repr, ROLES))})
    AND pg_has_role(current_user, oid, 'USAGE')
    AND NOT pg_has_role(
      current_user, (SELECT relowner FROM pg_class WHERE pg_class.oid = of_table), 'USAGE')
$body$"""

# The path is pinned. `mine` are the roles of whoever does it.
_FUNCTION = """
DO $do$ BEGIN EXECUTE replace($create$
CREATE OR REPLACE FUNCTION <name>() RETURNS trigger
LANGUAGE plpgsql SET search_path = <schema>, pg_temp AS $body$
DECLARE mine text[] := specbatch_bound(TG_RELID); last record; why text;
BEGIN
  IF mine IS NULL THEN RETURN NEW; END IF;
  <body>
  IF why IS NOT NULL THEN
    RAISE insufficient_privilege
      USING MESSAGE = 'table ' || TG_TABLE_NAME || ': ' || why;
  END IF;
  RETURN NEW;
END $body$
$create$, '<schema>', quote_ident(current_schema())); END $do$"""

_LAST = """
  SELECT number, hash INTO last FROM audit_log
    WHERE job_id = NEW.job_id ORDER BY number DESC LIMIT 1;"""

# Each says why it may not be, where it may not.
_BODIES = {
    "specbatch_entry": f"""{_LAST}
  why := CASE
    WHEN NOT CASE NEW.kind {_KINDS} ELSE ARRAY[]::text[] END && mine
      THEN 'entries of kind ' || NEW.kind || ' are for another role: use a login that has it'
    WHEN NOT CASE WHEN NEW.actor ~ ':[0-9]+$' THEN ARRAY['{WORKER}'] ELSE {_PEOPLE} END && mine
      THEN 'the actor is not one of this role: workers are called HOST:PROCESS, and nobody else '
        'may end in a colon and a number, which SPECBATCH_ACTOR decides'
    WHEN NEW.number <> coalesce(last.number, 0) + 1
        OR NEW.previous <> coalesce(last.hash, decode('{FIRST.hex()}', 'hex'))
      THEN 'the entry does not follow the last one'
  END;""",
    "specbatch_head": f"""{_LAST}
  IF NOT EXISTS (SELECT FROM jobs WHERE job_id = NEW.job_id
      AND log_number = last.number AND log_head = last.hash) THEN
    why := 'log_head of a job is the last entry of its log';
  END IF;""",
    "specbatch_new_job": f"""
  IF NEW.state <> '{JobState.QUEUED.value}' OR NEW.stage <> '{Stage.INGEST.value}'
      OR NEW.ingest_done OR NEW.report::jsonb <> jsonb_build_object()
      OR (NEW.next_row, NEW.groups_total, NEW.rows_total) <> (0, 0, 0) THEN
    why := 'a new job is queued, and nothing of it is done';
  END IF;""",
    "specbatch_job": f"""
  why := CASE
    WHEN NEW.log_number <= OLD.log_number AND (
      (NEW.numeric_class, NEW.model_fingerprint, NEW.model_parts::text, NEW.proposer_fingerprint)
        IS DISTINCT FROM
      (OLD.numeric_class, OLD.model_fingerprint, OLD.model_parts::text, OLD.proposer_fingerprint)
      OR (NEW.deadline_at, NEW.budget_usd, NEW.cancel_requested, NEW.stop_reason, NEW.purged_at)
        IS DISTINCT FROM
      (OLD.deadline_at, OLD.budget_usd, OLD.cancel_requested, OLD.stop_reason, OLD.purged_at)
      OR (NEW.state <> OLD.state AND ARRAY[NEW.state, OLD.state] && {_ENDS})
    ) THEN 'models, limits, stop and end of a job change only with an entry in its log'
    WHEN NEW.state <> OLD.state AND ARRAY[NEW.state, OLD.state] && {_ENDS} AND NOT EXISTS (
      SELECT FROM audit_log WHERE job_id = NEW.job_id AND number = NEW.log_number
        AND kind IN {_TURNING}
    ) THEN 'a job ends, and is sent back to work, with the entry in its log that says so'
    WHEN NEW.purged_at IS DISTINCT FROM OLD.purged_at AND NOT (
      NEW.purged_at IS NOT NULL AND OLD.state = ANY({_ENDS}) AND EXISTS (
        SELECT FROM audit_log WHERE job_id = NEW.job_id AND number = NEW.log_number
          AND number > OLD.log_number AND kind = '{EntryKind.PURGED.value}')
    ) THEN 'a job is purged once it has ended, with an entry in its log that says so'
    WHEN NOT '{OPERATOR}' = ANY(mine) AND (
      NEW.numeric_class IS DISTINCT FROM coalesce(OLD.numeric_class, NEW.numeric_class)
      OR NEW.model_fingerprint
        IS DISTINCT FROM coalesce(OLD.model_fingerprint, NEW.model_fingerprint)
      OR NEW.proposer_fingerprint
        IS DISTINCT FROM coalesce(OLD.proposer_fingerprint, NEW.proposer_fingerprint)
    ) THEN 'the models and the class that a job has pinned stay'
    WHEN NEW.report::text <> OLD.report::text AND (
      OLD.state = ANY({_ENDS}) OR EXISTS (
        SELECT FROM json_object_keys(OLD.report) AS known WHERE NEW.report -> known IS NULL)
    ) THEN 'a report loses nothing, and stays when its job has ended'
    WHEN NOT {_DOERS} && mine AND (
      NEW.last_error IS DISTINCT FROM CASE WHEN NEW.last_error IS NOT NULL THEN OLD.last_error END
      OR NEW.sealed_spec
        IS DISTINCT FROM CASE WHEN NEW.sealed_spec IS NOT NULL THEN OLD.sealed_spec END
    ) THEN 'this role only empties texts'
  END;""",
    "specbatch_ended_job": f"""
  why := CASE
    WHEN mine = ARRAY['{WORKER}'] THEN 'a job that has ended stays as it is for workers'
    WHEN NOT ('{OPERATOR}' = ANY(mine) AND NEW.log_number > OLD.log_number)
        AND to_jsonb(NEW) - {_AFTER_THE_END} <> to_jsonb(OLD) - {_AFTER_THE_END}
      THEN 'a job that has ended changes only with an entry in its log, by an operator'
  END;""",
    "specbatch_ended_group": f"""
  IF NOT '{OPERATOR}' = ANY(mine)
      AND to_jsonb(NEW) - 'last_error' <> to_jsonb(OLD) - 'last_error'
      OR mine = ARRAY['{WORKER}'] THEN
    why := 'a group that has ended stays as it is for workers';
  END IF;""",
    "specbatch_slice": """
  why := 'what was measured only grows, and what is kept of it stays kept';""",
    "specbatch_group": f"""
  IF NOT {_DOERS} && mine THEN why := 'this role only empties texts'; END IF;""",
    "specbatch_completion": """
  why := CASE
    WHEN (NEW.row_id, NEW.text) <> ('', '')
        OR cardinality(NEW.token_ids) + cardinality(NEW.logprobs) <> 0
        OR num_nonnulls(NEW.error, NEW.top_token_ids, NEW.top_logprobs, NEW.rejected) <> 0
      THEN 'texts are only emptied'
    WHEN NOT EXISTS (SELECT FROM jobs WHERE job_id = NEW.job_id AND purged_at IS NOT NULL)
      THEN 'texts are emptied once their job is purged'
  END;""",
    "specbatch_rejected": """
  why := CASE
    WHEN NEW.row_id IS NOT NULL OR NEW.reason <> '' THEN 'texts are only emptied'
    WHEN NOT EXISTS (SELECT FROM jobs WHERE job_id = NEW.job_id AND purged_at IS NOT NULL)
      THEN 'texts are emptied once their job is purged'
  END;""",
}

_CHECKED = (  # columns that `specbatch_job` looks at
    *("numeric_class", "model_fingerprint", "model_parts", "proposer_fingerprint"),
    *("deadline_at", "budget_usd", "cancel_requested", "stop_reason", "purged_at", "state"),
    *("report", "last_error", "sealed_spec"),
)
_AT_END = "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
_HEAD = "log_number, log_head"

# Trigger: its table, when it fires, and its function.
_TRIGGERS = {
    "audit_log_entry": ("audit_log", "BEFORE INSERT", "FOR EACH ROW", "specbatch_entry"),
    "audit_log_head": ("audit_log", "AFTER INSERT", _AT_END, "specbatch_head"),
    "jobs_head": ("jobs", f"AFTER INSERT OR UPDATE OF {_HEAD}", _AT_END, "specbatch_head"),
    "jobs_new": ("jobs", "BEFORE INSERT", "FOR EACH ROW", "specbatch_new_job"),
    "jobs_change": (
        "jobs", f"BEFORE UPDATE OF {', '.join(_CHECKED)}", "FOR EACH ROW", "specbatch_job"
    ),
    "jobs_ended": (
        "jobs", "BEFORE UPDATE", f"FOR EACH ROW WHEN (OLD.state = ANY({_ENDS}))",
        "specbatch_ended_job",
    ),
    "groups_ended": (
        "groups", "BEFORE UPDATE", f"FOR EACH ROW WHEN (OLD.stage IN {_CLOSED})",
        "specbatch_ended_group",
    ),
    "time_slices_grow": (
        "time_slices", "BEFORE UPDATE", f"FOR EACH ROW WHEN (NEW.kept < OLD.kept OR {_SHRINKS})",
        "specbatch_slice",
    ),
    "stage_usage_grows": (
        "stage_usage",
        "BEFORE UPDATE",
        f"FOR EACH ROW WHEN (NEW.kept < OLD.kept OR {_USE_SHRINKS})",
        "specbatch_slice",
    ),
    "groups_error": (
        "groups",
        "BEFORE UPDATE OF last_error",
        "FOR EACH ROW WHEN (NEW.last_error <> coalesce(OLD.last_error, ''))",
        "specbatch_group",
    ),
    "completions_emptied": (
        "completions", "BEFORE UPDATE", "FOR EACH ROW", "specbatch_completion"
    ),
    "rejected_rows_emptied": (
        "rejected_rows", "BEFORE UPDATE", "FOR EACH ROW", "specbatch_rejected"
    ),
}  # fmt: skip

# Earlier revisions lack some tables.
_ON_TABLE = """
DO $do$ BEGIN IF to_regclass('{table}') IS NOT NULL THEN EXECUTE $made${made}$made$; END IF; END
$do$"""

_OF_ENDED = ("jobs_ended", "groups_ended", "time_slices_grow")  # since revision 0016


def creating() -> Iterator[str]:
    """Statements for PostgreSQL; they replace earlier triggers."""
    yield _BOUND
    for name, body in _BODIES.items():
        yield _FUNCTION.replace("<name>", name).replace("<body>", body)
    for name, (table, when, how, function) in _TRIGGERS.items():
        kind = "CONSTRAINT TRIGGER" if how == _AT_END else "TRIGGER"
        yield f"DROP TRIGGER IF EXISTS {name} ON {table}"
        made = f"CREATE {kind} {name} {when} ON {table} {how} EXECUTE FUNCTION {function}()"
        yield _ON_TABLE.format(table=table, made=made)


def dropping() -> Iterator[str]:
    """The inverse of `creating`, to run before the tables are dropped."""
    for name, (table, *_) in _TRIGGERS.items():
        yield f"DROP TRIGGER IF EXISTS {name} ON {table}"
    for name in (*_BODIES, "specbatch_bound"):
        yield f"DROP FUNCTION IF EXISTS {name}"


def dropping_of_ended() -> Iterator[str]:
    """Statements that remove what revision 0016 added."""
    for name in _OF_ENDED:
        table, _, _, function = _TRIGGERS[name]
        yield f"DROP TRIGGER IF EXISTS {name} ON {table}"
        yield f"DROP FUNCTION IF EXISTS {function}"
