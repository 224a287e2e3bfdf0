"""Migrations, run by the program itself: no alembic.ini, safe when many processes start at once."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, make_url
from tenacity import retry, retry_if_exception, stop_after_delay, wait_random_exponential

from specbatch.pipeline.ledger.sql import reading
from specbatch.pipeline.ledger.sql.databases import WRITES, make_engine
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.ledger.sql.transactions import (
    RETRY_SEC,
    explain,
    heard,
    is_database_error,
    is_transient,
)
from specbatch.schemas.encryption import Cipher
from specbatch.schemas.errors import StoreError
from specbatch.schemas.masking import mask_url
from specbatch.schemas.patience import NOBODY, Asking, NoAnswerError, patiently
from specbatch.schemas.placement import Site
from specbatch.schemas.sql_roles import ROLES, granting

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOCK_ID = 5_770_237_462  # any number that only specbatch's migrations use


def open_store(
    url: str,
    max_attempts: int = 3,
    migrate: bool = True,
    clock: Callable[[], float] | None = None,
    weights: Mapping[str, float] | None = None,
    cipher: Cipher | None = None,
    actor: str | None = None,
    lineage: bool = False,
    site: Site | None = None,
) -> SqlStore:
    """A store ready for use; with `migrate`, its tables are made or brought up to date first. One
    that is up to date is asked over the connection that the store then uses.

    `weights` are the tenants' shares; `cipher` encrypts texts; `actor` is whom the audit log names;
    `lineage`: jobs are told to OpenLineage; `site`: where the worker is that claims.
    """
    store = SqlStore(
        url,
        max_attempts,
        clock=clock,
        weights=weights,
        cipher=cipher,
        actor=actor,
        lineage=lineage,
        site=site,
    )
    try:
        if migrate and store.revision() != head():
            upgrade(url)
    except BaseException:
        store.close()
        raise
    return store


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, StoreError) and is_transient(error.__cause__ or error)


_again = retry(
    retry=retry_if_exception(_is_transient),
    stop=stop_after_delay(RETRY_SEC),
    wait=wait_random_exponential(multiplier=0.05, max=2.0),
    reraise=True,
)


def upgrade(url: str, revision: str = "head") -> None:
    """Bring the database to `revision`; does nothing, without a lock, when it is there already.

    Raises `StoreError` when the database cannot be migrated, or belongs to a newer specbatch.
    """
    there = _patiently(url, lambda asking: _again(current)(url, asking))
    if revision == "head" and there == head():
        return
    _patiently(url, lambda asking: _upgrade(url, revision, asking))
    if there is not None and revision == "head":
        log.warning(
            "migrated the database %s from revision %s to %s: earlier versions of specbatch cannot "
            "open it any more",
            mask_url(url),
            there,
            head(),
        )


@_again
def _upgrade(url: str, revision: str, asking: Asking) -> None:
    with locked(url, asking) as config:
        command.upgrade(config, revision)


def _patiently(url: str, work: Callable[[Asking], T]) -> T:
    try:
        return patiently(f"the database {mask_url(url)}", RETRY_SEC, work)
    except NoAnswerError as error:
        raise StoreError(str(error)) from error


def grant_roles(url: str) -> list[str]:
    """Give the roles of `sql_roles.py` their rights; the names of those that are missing.

    For databases whose migration could not create them, or that were migrated before a table was.
    """
    if make_url(url).get_backend_name() == "sqlite":
        return []
    return _patiently(url, lambda asking: _again(_grant)(url, asking))


def _grant(url: str, asking: Asking) -> list[str]:
    with connected(url, writes=True, asking=asking) as connection:
        _one_at_a_time(connection)
        for statement in granting():
            connection.exec_driver_sql(statement)
        found = connection.exec_driver_sql("SELECT rolname FROM pg_roles").scalars().all()
        return [role for role in ROLES if role not in found]


def current(url: str, asking: Asking = NOBODY) -> str | None:
    """The database's revision; None when it was never migrated."""
    with connected(url, asking=asking) as connection:
        return reading.revision(connection)


@cache  # reading all migrations takes longer than most commands' work in the store
def head() -> str | None:
    """The newest revision this installation knows."""
    return ScriptDirectory.from_config(alembic_config()).get_current_head()


def alembic_config() -> Config:
    config = Config(stdout=io.StringIO())
    folder = str(resources.files("specbatch.migrations"))
    config.set_main_option("script_location", folder.replace("%", "%%"))
    return config


@contextmanager
def connected(url: str, writes: bool = False, asking: Asking = NOBODY) -> Iterator[Connection]:
    """A connection in a transaction. Batch migrations rebuild tables, so foreign keys are off."""
    engine: Engine = make_engine(url, foreign_keys=False)
    asking.asks()
    try:
        with engine.execution_options(**{WRITES: writes}).begin() as connection:
            heard(connection, asking)
            yield connection
    except CommandError as error:
        raise StoreError(
            f"the database {mask_url(url)} cannot be migrated: {error}"
            " (was it made by a newer specbatch?)"
        ) from error
    except Exception as error:
        if not is_database_error(error):
            raise
        raise StoreError(explain(error, mask_url(url))) from error
    finally:
        engine.dispose()


@contextmanager
def locked(url: str, asking: Asking = NOBODY) -> Iterator[Config]:
    """Alembic's configuration with a connection; no other migration runs at the same time."""
    with connected(url, writes=True, asking=asking) as connection:  # on SQLite that is the lock
        if connection.dialect.name == "postgresql":
            # One transaction for all revisions: a machine that stalls must not end it half way.
            connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = '10min'")
            _one_at_a_time(connection)
        else:  # a table that is rebuilt is gone for a moment, which a view of it must bear
            connection.exec_driver_sql("PRAGMA legacy_alter_table = ON")
        config = alembic_config()
        attributes: dict[str, Any] = config.attributes
        attributes["connection"] = connection
        yield config


def _one_at_a_time(connection: Connection) -> None:
    """Lock out other migrations on PostgreSQL until the transaction ends."""
    connection.exec_driver_sql("SET LOCAL lock_timeout = 0")  # wait for the other process
    connection.exec_driver_sql("SELECT pg_advisory_xact_lock(%s)", (_LOCK_ID,))
