"""`{{ variable }}` in the texts of a schedule. Values are put in; nothing is ever executed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any

from specbatch.schemas.errors import SpecError

Value = str | int | float | bool

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"\{\{((?:(?!\}\}).)*)\}\}", re.DOTALL)
_BEGIN = "{{"


def built_in(schedule: str, logical: datetime) -> dict[str, Value]:
    """What every schedule may use. `logical` is the time it is run for, in its own zone."""
    utc = logical.astimezone(UTC)
    values: dict[str, Value] = {
        "schedule": schedule,
        "logical_time": logical.isoformat(),
        "logical_time.utc": f"{utc:%Y-%m-%dT%H:%M:%SZ}",
        "logical_time.compact": f"{utc:%Y%m%dT%H%M%SZ}",
        "time_zone": str(logical.tzinfo),
        "hour": f"{logical:%H}",
        "minute": f"{logical:%M}",
    }
    day = logical.date()
    for name, days in (("date", 0), ("yesterday", -1), ("tomorrow", 1)):
        values |= _of_day(name, day + timedelta(days=days))
    return values


def _of_day(name: str, day: date) -> dict[str, Value]:
    year, week, _ = day.isocalendar()
    return {
        name: day.isoformat(),
        f"{name}.year": f"{day:%Y}",
        f"{name}.month": f"{day:%m}",
        f"{name}.day": f"{day:%d}",
        f"{name}.compact": f"{day:%Y%m%d}",
        f"{name}.week": f"{year}-W{week:02}",
    }


def filled(value: Any, variables: Mapping[str, Value], where: str) -> Any:
    """The same value with variables put into its texts, at any depth.

    A text that is one variable and nothing else becomes its value, a number if it is one. Raises
    `SpecError` naming the field and the variable that nobody knows.
    """
    if isinstance(value, Mapping):
        return {
            key: filled(inner, variables, f"{where}.{key}" if where else str(key))
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [filled(inner, variables, f"{where}.{n}") for n, inner in enumerate(value)]
    if not isinstance(value, str) or _BEGIN not in value:
        return value
    if whole := _VARIABLE.fullmatch(value.strip()):
        return _value_of(whole, variables, where)
    text = _VARIABLE.sub(lambda found: str(_value_of(found, variables, where)), value)
    if _BEGIN in _VARIABLE.sub("", value):
        raise SpecError(f"field `{where}`: {{{{ without }}}} in {value!r}")
    return text


def _value_of(found: re.Match[str], variables: Mapping[str, Value], where: str) -> Value:
    name = found[1].strip()
    if name not in variables:
        raise SpecError(
            f"field `{where}`: unknown variable {{{{ {name} }}}}; there are "
            f"{', '.join(sorted(variables))}"
        )
    return variables[name]
