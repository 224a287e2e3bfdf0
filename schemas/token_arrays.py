"""Column types with a number per token or pass: arrays on PostgreSQL, JSON on SQLite.

On PostgreSQL some are packed, for they are most of a database. The functions of
`token_record.py` unpack them there.

    repeated  v, v, v, w       → v, -2, w              a negative number repeats what is before it
    origins   A A C, P, P, A A → 8 + C, P, -1, 4 + A   of each pass 4 · (tokens - 1) + its last one
    steps     5, 6, 7, 9       → 5, 3, 9, 1            where a row of steps begins, its length
    numbers   70, 40000        → 70, -2, 7232          digits of 15 bits; all but the last as -1 - d

No number begins with the digit 0, so of numbers a -1 where one begins is itself: `NOT_KEPT`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import JSON, Dialect, Integer, SmallInteger
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.types import TypeDecorator, TypeEngine

from specbatch.schemas.privacy import NOT_KEPT

_ACCEPTED = 1  # an `Origin`: no other token leaves its pass open
_BITS = 15
_DIGIT = 1 << _BITS
_MOST_REPEATS = _DIGIT  # what a smallint takes


class TokenArray(TypeDecorator[Sequence[float]]):
    """One number per token: an array on PostgreSQL, JSON on SQLite (where NaN is null)."""

    impl = JSON
    cache_ok = True

    def __init__(self, item: type[TypeEngine[Any]]) -> None:
        super().__init__()
        self.item = item

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(ARRAY(self.item))
        return dialect.type_descriptor(JSON(none_as_null=True))

    def process_bind_param(self, value: Sequence[float] | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        return list(self.packed(value) if dialect.name == "postgresql" else value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        if value is None:
            return None
        if dialect.name == "postgresql":
            return tuple(self.unpacked(value))
        if None not in value:
            return tuple(value)
        return tuple(float("nan") if item is None else item for item in value)

    def packed(self, values: Sequence[Any]) -> Sequence[Any]:
        """The values as PostgreSQL stores them."""
        return values

    def unpacked(self, values: Sequence[Any]) -> Sequence[Any]:
        return values


class Repeated(TokenArray):
    """Small numbers from 0 on that often repeat."""

    cache_ok = True

    def __init__(self) -> None:
        super().__init__(SmallInteger)

    def packed(self, values: Sequence[int]) -> list[int]:
        return _repeated(values)

    def unpacked(self, values: Sequence[int]) -> list[int]:
        return _unrepeated(values)


class Origins(Repeated):
    """Where each token came from, pass by pass."""

    cache_ok = True

    def packed(self, values: Sequence[int]) -> list[int]:
        if not any(values):
            return _same(0, len(values))
        ends = [i for i, origin in enumerate(values) if origin != _ACCEPTED]
        begins = [0, *(end + 1 for end in ends)]
        passes = [4 * (end - begin) + values[end] for begin, end in zip(begins, ends, strict=False)]
        if begins[-1] < len(values):  # the text ended inside of a draft
            passes.append(4 * (len(values) - 1 - begins[-1]) + _ACCEPTED)
        return _repeated(passes)

    def unpacked(self, values: Sequence[int]) -> list[int]:
        origins: list[int] = []
        for code in _unrepeated(values):
            origins += [_ACCEPTED] * (code >> 2)
            origins.append(code & 3)
        return origins


class Steps(TokenArray):
    """Rising numbers, most of them one more than the one before."""

    cache_ok = True

    def __init__(self) -> None:
        super().__init__(Integer)

    def packed(self, values: Sequence[int]) -> list[int]:
        if values and values[-1] - values[0] == len(values) - 1:
            return [values[0], len(values)]
        rows: list[int] = []
        for step in values:
            if rows and step == rows[-2] + rows[-1]:
                rows[-1] += 1
            else:
                rows += [step, 1]
        return rows

    def unpacked(self, values: Sequence[int]) -> list[int]:
        pairs = zip(values[::2], values[1::2], strict=True)
        return [first + i for first, count in pairs for i in range(count)]


class Numbers(TokenArray):
    """Numbers from 0 on, most below 32768 and some far beyond: token ids, device times.

    And -1 for those that are not kept.
    """

    cache_ok = True

    def __init__(self) -> None:
        super().__init__(SmallInteger)

    def packed(self, values: Sequence[int]) -> Sequence[int]:
        if max(values, default=0) < _DIGIT:
            return values
        digits = list(values)
        for i in reversed([i for i, value in enumerate(values) if value >= _DIGIT]):
            digits[i : i + 1] = _digits(values[i])
        return digits

    def unpacked(self, values: Sequence[int]) -> Sequence[int]:
        if min(values, default=0) >= 0:
            return values
        found, higher = [], 0
        for digit in values:
            if digit == NOT_KEPT and not higher:
                found.append(NOT_KEPT)
            elif digit < 0:
                higher = (higher - 1 - digit) << _BITS
            else:
                found.append(higher + digit)
                higher = 0
        return found


def _digits(value: int) -> list[int]:
    digits = [value & _DIGIT - 1]
    while value := value >> _BITS:
        digits.insert(0, -1 - (value & _DIGIT - 1))
    return digits


def _repeated(values: Sequence[int]) -> list[int]:
    if values and values.count(values[0]) == len(values):
        return _same(values[0], len(values))
    packed: list[int] = []
    last, count = -1, 0
    for value in values:
        if value == last:
            count += 1
            continue
        if count > 1:
            packed += _same(last, count)[1:]
        packed.append(value)
        last, count = value, 1
    return packed + _same(last, count)[1:]


def _same(value: int, count: int) -> list[int]:
    packed = [value] if count else []
    again = count - 1
    while again > 0:
        packed.append(-min(again, _MOST_REPEATS))
        again -= _MOST_REPEATS
    return packed


def _unrepeated(packed: Iterable[int]) -> list[int]:
    values: list[int] = []
    for code in packed:
        if code < 0:
            values += values[-1:] * -code
        else:
            values.append(code)
    return values
