"""How Alembic reaches the database: a Connection or a URL in `config.attributes`.

`specbatch.pipeline.ledger.sql.migrate` passes a connection with everything locked; there is no
alembic.ini. A URL names its driver (`postgresql+psycopg://`) and is for Alembic's own commands.
"""

from alembic import context
from sqlalchemy import Connection, create_engine, make_url

from specbatch.schemas import audit_tables as _audit_tables  # noqa: F401 - its tables join the metadata
from specbatch.schemas.sql_roles import granting
from specbatch.schemas.tables import Base, is_described


def run(connection: Connection) -> None:
    """Run the migrations inside the connection's transaction, all or nothing."""
    if connection.dialect.name == "postgresql":
        # Better to fail than to queue every worker behind a migration that waits for a table.
        connection.exec_driver_sql("SET LOCAL lock_timeout = '10s'")
        connection.exec_driver_sql("SET LOCAL statement_timeout = '600s'")
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        include_name=is_described,
        render_as_batch=connection.dialect.name == "sqlite",
        transactional_ddl=True,
    )
    migrations = context.get_context()
    before = migrations.get_current_revision() or ""
    with context.begin_transaction():
        context.run_migrations()
        if before < (migrations.get_current_revision() or ""):
            grant()


def grant() -> None:
    """Give the roles their rights on what there is now."""
    if context.get_context().dialect.name == "postgresql":
        for statement in granting():
            context.execute(statement)


def print_sql(url: str) -> None:
    """Write the migrations' SQL to Alembic's output without running it."""
    context.configure(
        url=url,
        target_metadata=Base.metadata,
        include_name=is_described,
        literal_binds=True,
        render_as_batch=make_url(url).get_backend_name() == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


attributes = context.config.attributes
if context.is_offline_mode():
    print_sql(attributes["url"])
elif "connection" in attributes:
    run(attributes["connection"])
else:
    engine = create_engine(attributes["url"])
    with engine.begin() as opened:
        run(opened)
    engine.dispose()
