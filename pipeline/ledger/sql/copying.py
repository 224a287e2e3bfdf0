"""Completions into PostgreSQL by COPY: through a staging table, for COPY itself cannot skip rows
that are known already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import orjson
from sqlalchemy import JSON, Connection, Dialect, text

from specbatch.schemas import usage
from specbatch.schemas.tables import Completion
from specbatch.schemas.text_columns import AnyText, EncryptedText
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
    writers = [
        (i, as_text)
        for i, column in enumerate(_COLUMNS)
        if (as_text := _writer_of(column, conn.dialect)) is not None
    ]
    usage.count(store_statements=1)  # the driver's own: SQLAlchemy does not see it
    with driver.cursor() as cursor, cursor.copy(_COPY) as copy:
        for row in values:
            line = list(_in_order(row))
            for i, as_text in writers:
                if line[i] is not None:
                    line[i] = as_text(line[i])
            copy.write_row(line)


def insert_staged(conn: Connection, of_job: Mapping[str, Any]) -> None:
    """Move the staged rows to `completions`, leaving out those that are there.

    `of_job`: the month in which their job was made, and its `job_verifier` and `job_proposer`.
    """
    conn.execute(_INSERT, dict(of_job))


def _array_literal(values: Sequence[float]) -> str:
    # A finished literal spares the driver one conversion per token.
    literal = orjson.dumps(values).decode()  # writes numbers as repr does, and NaN as null
    if "null" in literal:
        return "{" + ",".join(map(repr, values)) + "}"
    return "{" + literal[1:-1] + "}"


def _packed(pack: Callable[[Any], Any], values: Any) -> str:
    return "{" + orjson.dumps(pack(values)).decode()[1:-1] + "}"


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _writer_of(column: Any, dialect: Dialect) -> Callable[[Any], Any] | None:
    """What makes COPY's text of a column's values; None: the driver does. The dialect knows what
    encrypts its texts."""
    if isinstance(column.type, JSON):
        return _json
    if type(column.type) is TokenArray:
        return _array_literal
    if isinstance(column.type, TokenArray):
        return partial(_packed, column.type.packed)
    if isinstance(column.type, AnyText | EncryptedText):
        return partial(column.type.process_bind_param, dialect=dialect)
    return None


_in_order = itemgetter(*(column.name for column in _COLUMNS))
