"""Completions into PostgreSQL by COPY: through a staging table, for COPY itself cannot skip rows
that are known already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson
from sqlalchemy import JSON, Connection, text

from specbatch.schemas.tables import AnyText, Completion, TokenArray, escape_text

_COLUMNS = list(Completion.__table__.columns)
_NAMES = ", ".join(column.name for column in _COLUMNS)
_STAGING = "specbatch_staging"

# The table lives as long as the connection; its rows as long as the transaction.
_CREATE = text(
    f"CREATE TEMPORARY TABLE IF NOT EXISTS {_STAGING} (LIKE completions) ON COMMIT DELETE ROWS"
)
_COPY = f"COPY {_STAGING} ({_NAMES}) FROM STDIN"
_INSERT = text(
    f"INSERT INTO completions ({_NAMES}) SELECT {_NAMES} FROM {_STAGING} ON CONFLICT DO NOTHING"
)


def stage(conn: Connection, values: Iterable[Mapping[str, Any]]) -> None:
    """Copy the rows to this connection's staging table; they vanish with the transaction."""
    conn.execute(_CREATE)
    driver: Any = conn.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(_COPY) as copy:
        for row in values:
            copy.write_row([_as_text(row[column.name]) for column, _as_text in _WRITERS])


def insert_staged(conn: Connection) -> None:
    """Move the staged rows to `completions`, leaving out those that are there."""
    conn.execute(_INSERT)


def _array_literal(values: Iterable[float] | None) -> str | None:
    # A finished literal spares the driver one conversion per token.
    if values is None:
        return None
    literal = orjson.dumps(values).decode()  # writes numbers as repr does, and NaN as null
    if "null" in literal:
        return "{" + ",".join(map(repr, values)) + "}"
    return "{" + literal[1:-1] + "}"


def _as_it_is(value: Any) -> Any:
    return value


def _any_text(value: str | None) -> str | None:
    return None if value is None else escape_text(value)


def _json(value: Any) -> str | None:
    return None if value is None else orjson.dumps(value).decode()


def _writer_of(column: Any) -> Callable[[Any], Any]:
    if isinstance(column.type, JSON):
        return _json
    if isinstance(column.type, TokenArray):
        return _array_literal
    return _any_text if isinstance(column.type, AnyText) else _as_it_is


_WRITERS = [(column, _writer_of(column)) for column in _COLUMNS]
