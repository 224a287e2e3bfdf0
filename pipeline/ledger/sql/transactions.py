"""Transactions with retries: the one place where database errors become `StoreError`."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Row,
    Select,
    cast,
    func,
    literal,
    text,
    tuple_,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from specbatch.pipeline.ledger.sql.databases import WRITES, make_engine
from specbatch.schemas.crash_points import CrashPoint, reach
from specbatch.schemas.encryption import Cipher
from specbatch.schemas.errors import StoreError, first_line
from specbatch.schemas.masking import mask_url
from specbatch.schemas.patience import Asking, NoAnswerError, patiently
from specbatch.schemas.refusals import CHECK_DISK, FREE_SPACE, FREE_SPACE_OR_QUOTA
from specbatch.schemas.text_columns import use_cipher

T = TypeVar("T")
Now = ColumnElement[float]

ACTOR = "specbatch_actor"  # execution option: the actor of this transaction
LINEAGE = "specbatch_lineage"  # the same: whether starts and ends of jobs are queued for lineage
RETRY_SEC = 20.0  # how long an operation tries before it gives up
IDS_AT_ONCE = 5000  # in one statement: SQLite takes 32,766 parameters, PostgreSQL 65,535

_TRANSIENT_STATES = ("08", "40001", "40P01", "53300", "55P03", "57P01", "57P02", "57P03", "25P03")
_MISSING_TABLE_STATES = ("42P01", "42703")
# What a full or read-only disk is called, by SQLite and by PostgreSQL, and what to do about it.
_REMEDIES = {
    "disk is full": FREE_SPACE,
    "No space left on device": FREE_SPACE,
    "disk I/O error": f"{FREE_SPACE_OR_QUOTA}, or {CHECK_DISK}",
    "readonly database": "let this user write the file and its folder",
    "unable to open database file": "let this user write the file and its folder",
    "permission denied for table": (
        "use a login that has the role for it: specbatch_worker, _operator, _auditor or _privacy"
    ),
}


def in_parts(ids: Collection[str]) -> Iterator[Sequence[str]]:
    """As many as one statement can name, however many there are."""
    ordered = list(ids)
    for first in range(0, len(ordered), IDS_AT_ONCE):
        yield ordered[first : first + IDS_AT_ONCE]


@dataclass(frozen=True, slots=True)
class _InVain:
    """Why the same work failed each time, by the database's answer, and the remedy."""

    states: tuple[str, ...]  # of PostgreSQL, or how they begin
    words: tuple[str, ...]  # where there is no state: on connecting, and of SQLite
    said: str
    remedy: str


_IN_VAIN = (
    _InVain(
        *(("40001", "40P01"), ()),
        "undid this work each time in favour of other work",
        "try again when it is less busy",
    ),
    _InVain(
        *(("55P03",), ("is locked",)),
        "is locked by another process",
        "try again when that one has ended its work",
    ),
    _InVain(
        *(
            ("53300",),
            ("too many clients", "too many connections", "connection slots are reserved"),
        ),
        "takes no more connections",
        "raise its limit on connections, or run fewer processes",
    ),
    _InVain(
        ("57P",),
        ("is starting up", "is shutting down", "not yet accepting", "in recovery mode"),
        "is starting or stopping",
        "try again when it runs",
    ),
    _InVain(("25P03",), (), "ended a transaction that had paused for too long", "try again"),
)
_NO_ANSWER = _InVain((), (), "did not answer in time", "see that it runs and is reachable")
_REFUSING_SQLITE = (
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR),
    *(sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN),
)
_REFUSING_POSTGRES = ("53100", "58030", "25006")  # disk full, I/O error, read-only
_HOPELESS_CONNECTIONS = (
    *("authentication failed", "does not exist", "no pg_hba.conf entry"),
    *("certificate verify failed", "root certificate file", "server does not support SSL"),
)


SERVER_TIME: Now = cast(func.extract("epoch", func.clock_timestamp()), Double)


class Transactions:
    """Runs functions in transactions on one database. Shared by threads.

    A transient error (busy database, deadlock, dropped connection) runs the function again from
    its beginning, so it must keep no state of its own.
    """

    def __init__(
        self,
        url: str,
        clock: Callable[[], float] | None = None,
        retry_sec: float = RETRY_SEC,
        actor: str = "",
        cipher: Cipher | None = None,
        lineage: bool = False,
    ) -> None:
        """`actor` is whom the audit log names by default; `cipher` encrypts texts; `lineage`: jobs
        are told to OpenLineage."""
        self._reader = make_engine(url)
        use_cipher(self._reader.dialect, cipher)
        self._writer = self._reader.execution_options(
            **{WRITES: True, ACTOR: actor, LINEAGE: lineage}
        )
        self._clock = clock
        self._retry_sec = retry_sec
        self.shown_url = mask_url(url)
        self.is_postgres = self._reader.dialect.name == "postgresql"

    def now(self) -> Now:
        """The store's time as an SQL expression: the database's clock where it has a server."""
        if self._clock is None and self.is_postgres:
            return SERVER_TIME  # always the same object, so that statements with it can be cached
        return literal(self.local_time(), Double)

    def local_time(self) -> float:
        """Seconds since the epoch by this process's clock, or the injected one."""
        return (self._clock or time.time)()

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run work that reads. Raises `StoreError` when the database refuses or is out of reach."""
        return self._run(self._reader, work)

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run work that writes: all of it is committed, or nothing.

        Where the answer to a COMMIT is lost, the work is done again. Then its fencing token is
        refused, or it changes nothing that matters.
        """
        return self._run(self._writer, work)

    def write_once(self, work: Callable[[Connection], T]) -> T:
        """The same for work that another time would do something else, for one statement more."""
        once: Callable[[Connection], T] = _Once(work) if self.is_postgres else work
        return self._run(self._writer, once)

    def rows(self, query: Select[Any]) -> Sequence[Row[Any]]:
        """All rows of a query."""
        return self.read(lambda conn: conn.execute(query).all())

    def pages(
        self, query: Select[Any], key: Sequence[Any], size: int
    ) -> Iterator[Sequence[Row[Any]]]:
        """Rows by their key, `size` at a time: no long transaction, little memory."""
        page = query = query.order_by(*key).limit(size)
        while rows := self.rows(page):
            yield rows
            if len(rows) < size:
                return
            page = query.where(tuple_(*key) > tuple(getattr(rows[-1], one.key) for one in key))

    def close(self) -> None:
        self._reader.dispose()

    def _run(self, engine: Any, work: Callable[[Connection], T]) -> T:
        retrying = Retrying(
            retry=retry_if_exception(is_transient),
            stop=stop_after_delay(self._retry_sec),
            wait=wait_random_exponential(multiplier=0.02, max=2.0),
            reraise=True,
        )
        try:
            done: T = patiently(
                f"the database {self.shown_url}",
                self._retry_sec,
                lambda asking: retrying(_in_transaction, engine, work, asking),
            )
            return done
        except NoAnswerError as error:
            raise StoreError(str(error)) from error
        except Exception as error:
            if not is_database_error(error):
                raise
            refused = is_refused(error)
            raise StoreError(explain(error, self.shown_url), refused=refused) from error


class _UndecidedError(SQLAlchemyError):
    """The server has not noticed yet that the connection of a transaction is gone."""

    def __init__(self) -> None:
        super().__init__("it has not ended the transaction of a lost connection yet")


class _Once:
    """Work of which no second run follows one that was committed.

    When a connection is lost in a COMMIT, only the server knows what became of it. It is asked by
    the transaction's number. (SQLite's COMMIT is this process's own, and never in doubt.)
    """

    def __init__(self, work: Callable[[Connection], Any]) -> None:
        self._work = work
        self._number: int | None = None  # of the transaction that was to be committed
        self._done: Any = None

    def __call__(self, conn: Connection) -> Any:
        became = self._number and conn.scalar(_STATUS, {"number": self._number})
        if became == "in progress":
            raise _UndecidedError
        if became != "committed":
            self._number = None
            self._done = self._work(conn)
            self._number = conn.scalar(_NUMBER)
        return self._done


_NUMBER = text("SELECT txid_current_if_assigned()")
# A server may have taken over without this transaction: its number is still to come there.
_STATUS = text("SELECT CASE WHEN :number < txid_current() THEN txid_status(:number) END")


def _in_transaction(engine: Any, work: Callable[[Connection], T], asking: Asking) -> T:
    writes = engine.get_execution_options().get(WRITES, False)
    asking.asks()
    with engine.begin() as connection:
        heard(connection, asking)
        done = work(connection)
        if writes:
            reach(CrashPoint.SQL_COMMIT)
    if writes:
        reach(CrashPoint.COMMITTED)
    return done


def heard(connection: Connection, asking: Asking) -> None:
    """Report to the waiting caller that the database answers. A pooled connection may be dead."""
    if asking.is_awaited and connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SELECT 1")  # BEGIN goes with it: it was not sent yet
    asking.answered()


def upsert(dialect: str, table: type[Any]) -> Any:
    """An insert that can say what becomes of a row that is there."""
    return (postgresql if dialect == "postgresql" else sqlite).insert(table)


def is_transient(error: BaseException) -> bool:
    """Whether the same work may succeed if it is simply done again."""
    if not is_database_error(error):
        return False
    if isinstance(error, _UndecidedError):
        return True
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    cause = _cause(error)
    if isinstance(cause, sqlite3.OperationalError):
        return "locked" in str(cause) or "busy" in str(cause)
    state = getattr(cause, "sqlstate", None)
    if state is not None:
        return str(state).startswith(_TRANSIENT_STATES)
    # psycopg gives no state when the server cannot be reached or the connection broke.
    if type(cause).__name__ != "OperationalError" or not _is_psycopg(cause):
        return False
    return not any(words in str(cause) for words in _HOPELESS_CONNECTIONS)


def is_refused(error: BaseException) -> bool:
    """Whether nobody can write the database: no space, no rights, a broken disk."""
    cause = _cause(error)
    if isinstance(cause, sqlite3.Error):
        return getattr(cause, "sqlite_errorcode", 0) & 0xFF in _REFUSING_SQLITE
    return getattr(cause, "sqlstate", None) in _REFUSING_POSTGRES


def explain(error: BaseException, shown_url: str) -> str:
    """One sentence about a database error; no password, no statement, no values."""
    cause = _cause(error)
    state = getattr(cause, "sqlstate", None)
    if state in _MISSING_TABLE_STATES or "no such table" in str(cause):
        return (
            f"the database {shown_url} lacks specbatch's tables or has old ones; migrate it first"
        )
    line = first_line(cause)
    if is_transient(error):
        why = _why_in_vain(state, line)
        return f"the database {shown_url} {why.said}: {line}; {why.remedy}"
    remedy = next((what for sign, what in _REMEDIES.items() if sign in line), None)
    return f"the database {shown_url} refused: {line}" + (f"; {remedy}" if remedy else "")


def _why_in_vain(state: str | None, line: str) -> _InVain:
    for why in _IN_VAIN:
        if state is not None and state.startswith(why.states):
            return why
        if state is None and any(words in line for words in why.words):
            return why
    return _NO_ANSWER


def _cause(error: BaseException) -> BaseException:
    return getattr(error, "orig", None) or error


def is_database_error(error: BaseException) -> bool:
    """Whether it comes from SQLAlchemy or one of the two drivers."""
    return isinstance(error, SQLAlchemyError | sqlite3.Error) or _is_psycopg(error)


def _is_psycopg(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "psycopg"
