"""How Alembic reaches the database: a Connection or a URL in `config.attributes`.

`specbatch.pipeline.ledger.migrate` passes one; there is no alembic.ini.
"""

from alembic import context
from sqlalchemy import Connection

from specbatch.pipeline.ledger.engine_factory import make_engine, parse_url
from specbatch.schemas.tables import Base


def run(connection: Connection) -> None:
    """Run the migrations inside the connection's transaction, all or nothing."""
    if connection.dialect.name == "postgresql":
        # Better to fail than to queue every worker behind a migration that waits for a table.
        connection.exec_driver_sql("SET LOCAL lock_timeout = '10s'")
        connection.exec_driver_sql("SET LOCAL statement_timeout = '600s'")
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=connection.dialect.name == "sqlite",
        transactional_ddl=True,
    )
    with context.begin_transaction():
        context.run_migrations()


def run_offline(url: str) -> None:
    """Print the SQL instead of running it."""
    context.configure(
        url=parse_url(url).render_as_string(hide_password=False),
        target_metadata=Base.metadata,
        literal_binds=True,
        render_as_batch=url.startswith("sqlite"),
    )
    with context.begin_transaction():
        context.run_migrations()


attributes = context.config.attributes
if context.is_offline_mode():
    run_offline(attributes["url"])
elif "connection" in attributes:
    run(attributes["connection"])
else:
    engine = make_engine(attributes["url"], foreign_keys=False)
    with engine.begin() as opened:
        run(opened)
    engine.dispose()
