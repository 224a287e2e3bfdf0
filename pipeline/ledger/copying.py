"""Completions into PostgreSQL by COPY: through a staging table, for COPY itself cannot skip rows
that are known already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import orjson
from sqlalchemy import JSON, Connection, text

from specbatch.schemas.tables import AnyText, Completion, escape_text
from specbatch.schemas.token_arrays import TokenArray

_COLUMNS = [column for column in Completion.__table__.columns if column.name != "month"]
_NAMES = ", ".join(column.name for column in _COLUMNS)
_STAGING = "specbatch_staging"
# As `completion_rows.beside_job` has it.
_OF_JOB = {
    "verifier": "nullif(verifier, :job_verifier)",
    "proposer": "CASE WHEN proposer IS DISTINCT FROM :job_proposer THEN coalesce(proposer, '') END",
}
_KEPT = ", ".join(_OF_JOB.get(column.name, column.name) for column in _COLUMNS)

# The table lives as long as the connection; its rows as long as the transaction.
_CREATE = text(
    f"CREATE TEMPORARY TABLE IF NOT EXISTS {_STAGING} ON COMMIT DELETE ROWS"
    f" AS SELECT {_NAMES} FROM completions WITH NO DATA"
)
_COPY = f"COPY {_STAGING} ({_NAMES}) FROM STDIN"
_INSERT = text(
    f"INSERT INTO completions ({_NAMES}, month) SELECT {_KEPT}, :month FROM {_STAGING}"
    " ON CONFLICT DO NOTHING"
)


def stage(conn: Connection, values: Iterable[Mapping[str, Any]]) -> None:
    """Copy the rows to this connection's staging table; they vanish with the transaction."""
    conn.execute(_CREATE)
    driver: Any = conn.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(_COPY) as copy:
        for row in values:
            copy.write_row([_as_text(row[column.name]) for column, _as_text in _WRITERS])


def insert_staged(conn: Connection, of_job: Mapping[str, Any]) -> None:
    """Move the staged rows to `completions`, leaving out those that are there.

    `of_job`: the month in which their job was made, and its `job_verifier` and `job_proposer`.
    """
    conn.execute(_INSERT, dict(of_job))


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


def _packed(pack: Callable[[Any], Any], values: Any) -> str | None:
    return None if values is None else _array_literal(pack(values))


def _writer_of(column: Any) -> Callable[[Any], Any]:
    if isinstance(column.type, JSON):
        return _json
    if type(column.type) is TokenArray:
        return _array_literal
    if isinstance(column.type, TokenArray):
        return partial(_packed, column.type.packed)
    return _any_text if isinstance(column.type, AnyText) else _as_it_is


_WRITERS = [(column, _writer_of(column)) for column in _COLUMNS]
