"""Group roles for workers, operators and auditors, on PostgreSQL.

Revision 0006. Their rights are granted at the end of an upgrade, by `env.py`. A migrating user who
may not create roles gets a warning that says what to run; the next `specbatch migrate` gives them
their rights. SQLite has no roles.

Statements look into specs and reports from here on. PostgreSQL keeps JSON with U+0000 and then
refuses to look into it, so one such job would stop all claims: the character becomes U+FFFD.
"""

import logging

import sqlalchemy as sa
from alembic import op

from specbatch.migrations.shared import on_postgres
from specbatch.schemas.sql_roles import ROLES, creating_roles, how_to_create, revoking

revision = "0006"
down_revision = "0005"

log = logging.getLogger("specbatch.migrations")

# A backslash may itself be escaped: then what follows is text.
_WITHOUT_NUL = r"""
UPDATE jobs SET {column} = CAST(
  regexp_replace(CAST({column} AS text), '(?<!\\)((\\\\)*)\\u0000', '\1\\ufffd', 'g') AS json)
WHERE strpos(CAST({column} AS text), '\u0000') > 0
"""


def upgrade() -> None:
    if op.get_context().dialect.name != "postgresql":
        return
    for column in ("spec", "report"):
        op.execute(sa.text(_WITHOUT_NUL.format(column=column)))
    for statement in creating_roles():
        op.execute(statement)
    if op.get_context().as_sql:
        return
    query = sa.text("SELECT count(*) FROM pg_roles WHERE rolname = ANY(:names)")
    if op.get_bind().execute(query, {"names": list(ROLES)}).scalar() != len(ROLES):
        log.warning(
            "the roles %s are missing, for this user may not create roles: have an administrator "
            "run `%s`, then run `specbatch migrate` again",
            *(", ".join(ROLES), how_to_create()),
        )


def downgrade() -> None:
    on_postgres(revoking())
