"""Says in our own words what pydantic found wrong with a mapping's fields."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel

# Parts of a location that name no field.
_OF_UNION = re.compile(r"literal|constrained|tuple\[|(str|int|float|bool|text|object)$")
# By pydantic's type of error: what the value must be. Braces are of the error's own context.
_MUST_BE = {
    "literal_error": "{expected}",
    "enum": "{expected}",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of fields",
    "model_attributes_type": "a mapping of fields",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "string_pattern_mismatch": "text that matches {pattern}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}

_MOST_SHOWN = 100  # characters of what was given


def explain(errors: Sequence[Any], model: type[BaseModel], flags: Collection[str] = ()) -> str:
    """All of pydantic's errors about a model, as parts of one sentence.

    `flags`: dotted names of fields that were given as flags, which are then named too.
    """
    found: dict[str, list[Any]] = {}
    # An unknown field may be what is missing, so it comes first.
    for error in sorted(errors, key=lambda error: error["type"] != "extra_forbidden"):
        found.setdefault(_where(error), []).append(error)
    return "; ".join(_explained(where, found[where], model, flags) for where in found)


def must_be(errors: Sequence[Any]) -> str:
    """What one value must be, by all errors about it, and what it is."""
    for error in errors:
        if error["type"] not in _MUST_BE:
            message = str(error["msg"]).removeprefix("Value error, ")
            return f"{message[0].lower()}{message[1:]}{_given(error)}"
    kinds = (_MUST_BE[error["type"]].format(**_limits(error)) for error in errors)
    return f"must be {', or '.join(dict.fromkeys(kinds))}{_given(errors[0])}"


def _limits(error: Any) -> dict[str, Any]:
    """The error's context, with 0 for 0.0."""
    limits = error.get("ctx", {}).items()
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in limits
    }


def _given(error: Any) -> str:
    given = error.get("input")
    if not isinstance(given, str | int | float | bool):
        return ""
    shown = repr(given)
    if len(shown) > _MOST_SHOWN:  # its quote is closed: what is quoted is told by pairs of them
        shown = f"{shown[:_MOST_SHOWN]}…{shown[-1]}"
    return f" (got {shown})"


def _where(error: Any) -> str:
    """The dotted name of the field; empty for the whole."""
    parts = (str(part) for part in error["loc"])
    return ".".join(part for part in parts if not _OF_UNION.match(part))


def _explained(
    where: str, errors: Sequence[Any], model: type[BaseModel], flags: Collection[str]
) -> str:
    first = errors[0]
    if first["type"] == "extra_forbidden":
        return _unknown(where, _fields_at(model, first["loc"][:-1]))
    if first["type"] == "missing":
        return f"field `{where}` is required"
    said = must_be(errors)
    given = next((name for name in flags if name == where or where.startswith(f"{name}.")), None)
    if given is not None:
        return f"{flag_of(given)} (field `{where}`): {said}"
    return f"field `{where}`: {said}" if where else said


def flag_of(field: str) -> str:
    """The flag of a dotted field of the job spec."""
    return "--" + field.removesuffix(".uri").rpartition(".")[2].replace("_", "-")


def first_with_nul(value: object, where: str = "") -> str | None:
    """The dotted name of the first of these plain JSON values with the character U+0000."""
    if "\0" in where or (isinstance(value, str) and "\0" in value):
        return where
    parts: list[tuple[str, object]] = []
    if isinstance(value, Mapping):
        parts = [(f"{where}.{name}".lstrip("."), part) for name, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(where, part) for part in value]
    found = (first_with_nul(part, place) for place, part in parts)
    return next((place for place in found if place is not None), None)


def _unknown(where: str, allowed: list[str]) -> str:
    if where == "pick":
        return "section `pick` is for `specbatch pick`: use that command, or leave the section out"
    name = where.rpartition(".")[2]
    near = get_close_matches(name, allowed, 1)
    meant = f" (did you mean `{near[0]}`?)" if near else ""
    return f"unknown field `{where}`{meant}; allowed here: {', '.join(allowed)}"


def _fields_at(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    for part in location:
        # The item of a list, or the form of a value that has several: its model is taken already.
        if isinstance(part, int) or _OF_UNION.match(part):
            continue
        field = model.model_fields.get(part)
        inner = None if field is None else _model_in(field.annotation)
        if inner is None:
            return []
        model = inner
    return sorted(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field takes, alone, in a list, or as one of several forms."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(part) for part in get_args(annotation))
    return next((model for model in found if model is not None), None)
