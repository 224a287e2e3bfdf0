"""Completions into PostgreSQL by COPY: through a staging table, for COPY itself cannot skip rows
that are known already.

COPY's binary form: of 64 rows with 128 tokens each, the server reads arrays written as text for
twice as long.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import index, itemgetter
from typing import Any

import orjson
from sqlalchemy import (
    JSON,
    REAL,
    BigInteger,
    Connection,
    Dialect,
    Float,
    Integer,
    LargeBinary,
    SmallInteger,
    text,
)

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
_COPY = f"COPY {_STAGING} ({_NAMES}) FROM STDIN (FORMAT BINARY)"
_INSERT = text(
    f"INSERT INTO completions ({_NAMES}, month) SELECT {_KEPT}, :month FROM {_STAGING}"
    " ON CONFLICT DO NOTHING"
)


def stage(conn: Connection, values: Iterable[Mapping[str, Any]]) -> None:
    """Copy the rows to this connection's staging table; they vanish with the transaction.

    Raises the driver's error for a number that is too large for its column: the database would
    refuse it, and so it is told as its refusal.
    """
    conn.execute(_CREATE)
    driver: Any = conn.connection.driver_connection
    writers = [
        (i, write)
        for i, column in enumerate(_COLUMNS)
        if (write := _writer_of(column, conn.dialect)) is not None
    ]
    usage.count(store_statements=1)  # the driver's own: SQLAlchemy does not see it
    with _too_large(), driver.cursor() as cursor, cursor.copy(_COPY) as copy:
        copy.set_types(_TYPES)
        for row in values:
            line = list(_in_order(row))
            for i, write in writers:
                if line[i] is not None:
                    line[i] = write(line[i])
            copy.write_row(line)


@contextmanager
def _too_large() -> Iterator[None]:
    try:
        yield
    except OverflowError as error:
        from psycopg.errors import NumericValueOutOfRange

        raise NumericValueOutOfRange("a number is too large for its column") from error


def insert_staged(conn: Connection, of_job: Mapping[str, Any]) -> None:
    """Move the staged rows to `completions`, leaving out those that are there.

    `of_job`: the month in which their job was made, and its `job_verifier` and `job_proposer`.
    """
    conn.execute(_INSERT, dict(of_job))


def _type_of(column: Any) -> str:
    """How the driver writes a column's values. What is bytes already goes as it is."""
    if isinstance(column.type, JSON | LargeBinary | TokenArray):
        return "bytea"
    if isinstance(column.type, BigInteger):
        return "int8"
    if isinstance(column.type, Integer):
        return "bytea"  # by `_int4`
    return "float8" if isinstance(column.type, Float) else "text"


def _writer_of(column: Any, dialect: Dialect) -> Callable[[Any], Any] | None:
    """What makes the driver's value of a column's; None: it is that. The dialect knows what
    encrypts its texts."""
    if isinstance(column.type, JSON):
        return orjson.dumps
    if isinstance(column.type, Integer) and not isinstance(column.type, BigInteger):
        return _int4
    if isinstance(column.type, TokenArray):
        return partial(_array, column.type.packed, *_ITEMS[column.type.item])
    if isinstance(column.type, AnyText | EncryptedText):
        return partial(column.type.process_bind_param, dialect=dialect)
    return None


def _int4(value: int) -> bytes:
    """Raises `OverflowError`; the driver would write the lower four bytes of any number."""
    return index(value).to_bytes(4, "big", signed=True)


# Of an array's items: their kind in Python and in PostgreSQL.
_ITEMS = {SmallInteger: ("h", 21), Integer: ("i", 23), REAL: ("f", 700)}
_HEAD = struct.Struct(">iiI")  # dimensions, whether an item is null, kind of the items
_DIMENSION = struct.Struct(">ii")  # items, number of the first


def _array(pack: Callable[[Any], Any], code: str, kind: int, values: Any) -> bytes:
    """An array as PostgreSQL sends it: before each item its length. Raises `OverflowError`."""
    numbers = array(code, pack(values))
    count, size = len(numbers), numbers.itemsize
    if not count:
        return _HEAD.pack(0, 0, kind)
    if sys.byteorder == "little":
        numbers.byteswap()
    data = numbers.tobytes()
    items = bytearray((size.to_bytes(4, "big") + bytes(size)) * count)
    for i in range(size):  # all first bytes, all second ones …: no loop over the items
        items[4 + i :: 4 + size] = data[i::size]
    return _HEAD.pack(1, 0, kind) + _DIMENSION.pack(count, 1) + items


_TYPES = [_type_of(column) for column in _COLUMNS]
_in_order = itemgetter(*(column.name for column in _COLUMNS))
