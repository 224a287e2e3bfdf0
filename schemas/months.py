"""Completions by month on PostgreSQL: a partition for each month in which jobs were made.

All completions of a job are in the partition of its month, so dropping a table removes old ones. A
function with its owner's rights creates partitions on demand, so that submitters need no right to
create tables. If a lock keeps it from creating one, the default partition takes the rows of that
month, all of them once it has some: no partition can be made any more for rows that are there.
"""

from __future__ import annotations

from datetime import UTC, datetime

PREFIX = "completions_"
FUNCTION = "specbatch_month(integer)"

CREATE_DEFAULT = f"CREATE TABLE {PREFIX}default PARTITION OF completions DEFAULT"
CREATE_INDEX = f"CREATE INDEX ix_{PREFIX}default_month ON {PREFIX}default (month)"

# ATTACH does not block writers, and CREATE … PARTITION OF would. But it locks the default
# partition, and while it waits for that, all other statements on completions wait behind it: so it
# waits briefly, and is not tried in vain. (`min` uses the index; EXISTS might read all rows.) Only
# one at a time tries it, for a look into that partition holds a lock on it, too. The path is
# pinned, because a caller's own temporary table must not be taken for ours.
CREATE_FUNCTION = f"""
DO $do$ BEGIN EXECUTE replace($create$
CREATE OR REPLACE FUNCTION specbatch_month(of_month integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {{schema}}, pg_temp SET lock_timeout = '2s'
AS $body$
DECLARE
  partition text := '{PREFIX}' || of_month;
  upto integer := CASE WHEN mod(of_month, 100) = 12 THEN of_month + 89 ELSE of_month + 1 END;
BEGIN
  IF to_regclass(partition) IS NOT NULL THEN
    RETURN;
  END IF;
  IF of_month NOT BETWEEN 190001 AND 999912 OR mod(of_month, 100) NOT BETWEEN 1 AND 12 THEN
    RAISE EXCEPTION 'no month' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  PERFORM pg_advisory_xact_lock('completions'::regclass::oid::bigint);
  IF to_regclass(partition) IS NOT NULL
      OR of_month = (SELECT min(month) FROM {PREFIX}default WHERE month >= of_month)
  THEN
    RETURN;
  END IF;
  SET LOCAL lock_timeout = '200ms';
  EXECUTE 'CREATE TABLE ' || partition || ' (LIKE completions INCLUDING ALL)';
  EXECUTE 'ALTER TABLE completions ATTACH PARTITION ' || partition
    || ' FOR VALUES FROM (' || of_month || ') TO (' || upto || ')';
EXCEPTION WHEN lock_not_available OR deadlock_detected OR duplicate_table OR duplicate_object
    OR unique_violation OR check_violation THEN
  NULL;
END $body$
$create$, '{{schema}}', quote_ident(current_schema())); END $do$"""

REVOKE_FUNCTION = f"REVOKE ALL ON FUNCTION {FUNCTION} FROM PUBLIC"
DROP_FUNCTION = f"DROP FUNCTION IF EXISTS {FUNCTION}"


def month_of(at: float) -> int:
    """The month of a time since the epoch, as yyyymm."""
    when = datetime.fromtimestamp(at, UTC)
    return when.year * 100 + when.month


def is_partition(table: str | None) -> bool:
    """Whether a table is one of the partitions, which no class describes."""
    return table is not None and table.startswith(PREFIX)
