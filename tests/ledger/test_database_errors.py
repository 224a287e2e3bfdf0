"""What is said of a database that answers, and does not do what was asked."""

from __future__ import annotations

import psycopg
import pytest
from sqlalchemy.exc import OperationalError

from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.ledger.sql.transactions import explain
from specbatch.schemas.errors import StoreError, UsageError
from support.servers import PrivatePostgres

UNAVAILABLE = [
    (psycopg.errors.DeadlockDetected("deadlock detected"), "undid this work each time in favour"),
    (psycopg.errors.SerializationFailure("could not serialize access"), "undid this work each"),
    (psycopg.errors.LockNotAvailable("lock timeout"), "is locked by another process"),
    (psycopg.errors.TooManyConnections("too many"), "takes no more connections"),
    (psycopg.OperationalError("FATAL: sorry, too many clients already"), "takes no more connect"),
    (psycopg.errors.AdminShutdown("terminating connection"), "is starting or stopping"),
    (psycopg.OperationalError("FATAL: the database system is starting up"), "is starting or stop"),
    (psycopg.OperationalError("connection refused"), "did not answer in time"),
]


@pytest.mark.parametrize(("cause", "said"), UNAVAILABLE, ids=lambda one: str(one)[:30])
def test_what_failed_again_and_again_is_told_as_what_it_is(cause: Exception, said: str) -> None:
    told = explain(OperationalError("SELECT 1", {}, cause), "postgresql://db")
    assert told.startswith(f"the database postgresql://db {said}")
    assert ("did not answer" in told) == (said == "did not answer in time")
    assert "; " in told, "there is a remedy"


def test_a_database_with_no_connection_left_is_not_called_silent(
    own_postgres: PrivatePostgres,
) -> None:
    url = own_postgres.create_database()
    with psycopg.connect(own_postgres.url, autocommit=True) as connection:
        connection.execute("CREATE ROLE narrow LOGIN CONNECTION LIMIT 0")
    store = SqlStore(url.replace(f"{own_postgres.user}@", "narrow@"), retry_sec=0.1)
    with pytest.raises(StoreError) as caught:
        store.list_jobs()
    store.close()
    assert "takes no more connections: " in str(caught.value)
    assert "too many connections for role" in str(caught.value)
    assert "did not answer" not in str(caught.value)


def test_a_database_that_knows_no_encoding_is_refused_with_the_remedy(
    own_postgres: PrivatePostgres,
) -> None:
    with psycopg.connect(own_postgres.url, autocommit=True) as connection:
        connection.execute(
            "CREATE DATABASE bytes TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'"
        )
    with pytest.raises(UsageError, match="database bytes has the encoding SQL_ASCII") as caught:
        open_store(own_postgres.url_of("bytes"))
    assert "--encoding UTF8" in str(caught.value)
