"""What tests do with migrations beyond an upgrade."""

from __future__ import annotations

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from specbatch.pipeline.ledger.sql import migrate
from specbatch.schemas import audit_tables as _audit_tables  # noqa: F401 - its tables join the metadata
from specbatch.schemas.tables import Base, is_described


def downgrade(url: str, revision: str = "base") -> None:
    """Take the database back to `revision`; `base` drops everything."""
    with migrate.locked(url) as config:
        command.downgrade(config, revision)


def revisions() -> list[str]:
    """All revisions this installation knows, oldest first."""
    scripts = ScriptDirectory.from_config(migrate.alembic_config()).walk_revisions()
    return [script.revision for script in scripts][::-1]


def check(url: str) -> list[str]:
    """What a migration would have to change for the database to fit the tables; empty: nothing."""
    with migrate.connected(url) as connection:
        opts = {"compare_server_default": True, "include_name": is_described}
        context = MigrationContext.configure(connection, opts=opts)
        return [repr(difference) for difference in compare_metadata(context, Base.metadata)]
