"""SQLAlchemy engines for the two databases, safe to share, and the place of a SQLite file."""

from __future__ import annotations

import logging
import re
import shlex
import sqlite3
import stat
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DisconnectionError

from specbatch.schemas import usage
from specbatch.schemas.errors import MissingExtraError, UsageError
from specbatch.schemas.file_modes import Access, make_folder, new_file, wide
from specbatch.schemas.masking import mask_url, remember
from specbatch.schemas.settings import Settings

BUSY_TIMEOUT_MS = 10_000
# Connections that a process keeps, if it ever needed as many at once: a worker's threads. Those
# beyond it would come and go with every transaction, and each costs the server a process.
POOL_SIZE = 16
_FILE = "specbatch_file"  # of a SQLite connection: which file its own is
WRITES = "specbatch_writes"  # execution option: this transaction will write

_POSTGRES_DEFAULTS = {
    "connect_timeout": 10,
    "application_name": "specbatch",
    # A host that vanishes sends no reset. Without these a call waits for its answer as long as the
    # system's TCP does: hours, or a quarter of one if the server has not even acknowledged it.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,  # ms
}
_ON_CONNECT_POSTGRES = (
    # A frozen worker must not hold a job's row for ever, nor wait for one for ever.
    "SET idle_in_transaction_session_timeout = '60s'",
    "SET lock_timeout = '30s'",
)


def make_engine(url: str, *, foreign_keys: bool = True) -> Engine:
    """An engine for a SQLite file or a PostgreSQL database; nothing is connected yet.

    Raises `UsageError` for any other URL and `MissingExtraError` when psycopg is not installed.
    """
    remember([url])
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(parsed, foreign_keys)
    return _postgres(parsed)


def parse_url(url: str) -> URL:
    """The URL with its driver spelled out. Raises `UsageError`."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise UsageError(
            f"the database URL {mask_url(url)!r} cannot be read; use sqlite:///path or postgresql://..."
        ) from None
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise UsageError(
            f"the database URL {mask_url(url)!r} names {parsed.drivername}; "
            "use sqlite or postgresql"
        )
    if parsed.database in (None, "", ":memory:"):
        raise UsageError(
            "SQLite needs a file, because several threads share the database: "
            "use sqlite:///path/to.db"
        )
    return parsed


def _sqlite(url: URL, foreign_keys: bool) -> Engine:
    assert url.database is not None
    folder = Path(url.database).absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the database's folder {folder} cannot be made: {error.strerror}"
        ) from None
    engine = create_engine(
        url, json_serializer=_dump_json, json_deserializer=orjson.loads, hide_parameters=True
    )

    file = Path(url.database)
    _count_statements(engine)

    @event.listens_for(engine, "connect")
    def _prepare(connection: sqlite3.Connection, record: Any) -> None:
        record.info[_FILE] = _identity(file)
        connection.isolation_level = None  # we say BEGIN ourselves, below
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA secure_delete = ON")  # what a purge empties is overwritten
        connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")

    @event.listens_for(engine, "checkout")
    def _check_file(_connection: object, record: Any, _proxy: object) -> None:
        """A copy may have been put in the file's place. Who still had the former open would write
        to it, and nobody would ever see what was written there."""
        if record.info.get(_FILE) != _identity(file):
            raise DisconnectionError("the database's file was replaced")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A transaction that reads first and writes later could fail half-way on a busy database.
        writes = connection.get_execution_options().get(WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None  # the operation itself says what is wrong
    return found.st_dev, found.st_ino


def _postgres(url: URL) -> Engine:
    try:
        import psycopg  # noqa: F401 - only to say early, and in plain words, that it is missing
    except ImportError:
        raise MissingExtraError(
            "PostgreSQL needs the psycopg driver: pip install 'specbatch[postgres]'"
        ) from None
    engine = create_engine(
        url,
        # The store's locking is written for READ COMMITTED, whatever the server's default is.
        isolation_level="READ COMMITTED",
        pool_size=POOL_SIZE,
        json_serializer=_dump_readable_json,
        json_deserializer=orjson.loads,
        hide_parameters=True,  # errors quote statements, in logs too, and no values
        connect_args={k: v for k, v in _POSTGRES_DEFAULTS.items() if k not in url.query},
    )

    _count_statements(engine)

    @event.listens_for(engine, "connect", insert=True)  # before SQLAlchemy reads text from it
    def _check_encoding(connection: Any, _record: object) -> None:
        if connection.info.parameter_status("server_encoding") == "SQL_ASCII":
            connection.close()
            raise UsageError(
                f"the database {url.database} has the encoding SQL_ASCII, and texts are UTF-8: "
                "make another with `createdb --template template0 --encoding UTF8 NAME`"
            )

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: object) -> None:
        autocommit, connection.autocommit = connection.autocommit, True
        connection.execute("; ".join(_ON_CONNECT_POSTGRES))
        connection.autocommit = autocommit

    return engine


def _count_statements(engine: Engine) -> None:
    """Each counts for the attempt that its thread works on. PostgreSQL's BEGIN is not seen here, so
    SQLite's is left out."""

    @event.listens_for(engine, "before_cursor_execute")
    def _count(_conn: object, _cursor: object, statement: str, *_: object) -> None:
        usage.count(store_statements=int(not statement.startswith("BEGIN")))


def _dump_json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()


def _dump_readable_json(value: Any) -> str:
    """JSON without NUL: PostgreSQL would keep it, and refuse each statement that looks into it."""
    dumped = _dump_json(value)
    return _NUL.sub(r"\1\\ufffd", dumped) if r"\u0000" in dumped else dumped


_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")  # a backslash may itself be escaped


# --- a SQLite file's place ------------------------------------------------------------------


log = logging.getLogger(__name__)

LOOKED_AT = 16  # of the workspace's files: one is enough for a warning

_warned: set[Path] = set()  # folders that this process has warned of


def has_store(settings: Settings) -> bool:
    """Whether there is a store: on SQLite, its file. Other databases are made by somebody else."""
    url = parse_url(settings.store_url)
    is_file = url.get_backend_name() == "sqlite" and url.database is not None
    return not is_file or Path(str(url.database)).exists()


def make_place(settings: Settings) -> None:
    """Make the SQLite file before SQLite does, whose other files get its mode; warn of files that
    others can read. Errors are left to the code that opens the store."""
    url = parse_url(settings.store_url)
    workspace = None if "://" in settings.workspace else Path(settings.workspace)
    if url.get_backend_name() == "sqlite" and url.database is not None:
        path = Path(url.database).absolute()
        with suppress(OSError):
            make_folder(path.parent, settings.store_mode, path.parent)
            new_file(path, settings.store_mode).close()
        _warn(path.parent, path, settings.store_mode, is_ours=path.parent == workspace)
    if workspace is not None:
        with suppress(OSError):  # there is none yet
            for path in islice(workspace.iterdir(), LOOKED_AT):
                _warn(workspace, path, settings.store_mode, is_ours=True)


def _warn(folder: Path, path: Path, access: Access, is_ours: bool) -> None:
    """Warn of a file that others may read in a folder that they may enter."""
    if folder in _warned or not (wide(path, access) and wide(folder, access)):
        return
    _warned.add(folder)
    others = "go" if access is Access.PRIVATE else "o"
    log.warning(
        "other users of this machine can read %s: run `%s`, or set SPECBATCH_STORE_MODE to %s if "
        "they are meant to",
        path,
        _remedy(folder, path, others, is_ours and not _has_more(folder)),
        "group or umask" if access is Access.PRIVATE else "umask",
    )


def _remedy(folder: Path, path: Path, others: str, whole: bool) -> str:
    """The command that shuts others out. It changes the whole folder only where all of it is the
    store's: in /tmp or beside a user's own files that would do harm."""
    if whole:
        return shlex.join(["chmod", "-R", f"{others}=", str(folder)])
    if path.is_dir():
        return shlex.join(["chmod", "-R", f"{others}=", str(path)])
    beside = [Path(f"{path}{end}") for end in ("", "-wal", "-shm")]
    return shlex.join(["chmod", f"{others}=", *(str(one) for one in beside if one.exists())])


def _has_more(folder: Path) -> bool:
    """Whether a workspace holds other files too: a user's folder, or everybody's."""
    try:
        at, home = Path.cwd(), Path.home()
        mode = folder.stat().st_mode
    except (OSError, RuntimeError):  # unknown
        return True
    return bool(mode & stat.S_ISVTX) or folder in (at, *at.parents, home, *home.parents)
