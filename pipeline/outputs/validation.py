"""Whether a finished text has its response format, judged apart from what enforced it.

A problem is told without a word of the text or of the schema: it comes into columns and logs that
outlive them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import orjson
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry

from specbatch.pipeline.outputs.tool_calls import calls_in
from specbatch.schemas.response_format import parsed
from specbatch.schemas.tools import TOOLS, call_form

_PREFIX = "the output does not have its response format: "
_OF_CALLS = "the output is not a call as its tools ask for: "
_CUT_CALL = f"{_OF_CALLS}it was cut before its end"


def problem_of(response_format: str, text: str, ended: bool) -> str | None:
    """Why a text does not have a format, in a sentence; None: it has.

    `ended`: its end is the model's own, not a stop string or the limit of tokens.
    """
    kind, _ = parsed(response_format)
    if kind == TOOLS:
        return _problem_of_calls(response_format, text, ended)
    if kind not in ("json_object", "json_schema"):
        return None if ended else f"{_PREFIX}it was cut before its end"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        why = "it is not JSON" if ended else "it was cut before its end"
        return _PREFIX + why
    if kind == "json_object":
        return None if isinstance(found, dict) else f"{_PREFIX}it is not a JSON object"
    unmet = _unmet(response_format, found)
    return None if unmet is None else f"{_PREFIX}`{unmet}` is not fulfilled"


def _problem_of_calls(form: str, text: str, ended: bool) -> str | None:
    try:
        found = calls_in(text)
    except ValueError:
        return _CUT_CALL if not ended else f"{_OF_CALLS}it is not whole"
    forms, may_answer, many = _of_calls(form)
    if found is None:
        return None if may_answer else _CUT_CALL if not ended else f"{_OF_CALLS}it has none"
    if not ended:
        return _CUT_CALL
    if len(found.calls) > 1 and not many:
        return f"{_OF_CALLS}it has several"
    for call in found.calls:
        if call.name not in forms:
            return f"{_OF_CALLS}it calls a function that was not offered"
        unmet = _unmet(forms[call.name], json.loads(call.arguments))
        if unmet is not None:
            return f"{_OF_CALLS}`{unmet}` of its arguments is not fulfilled"
    return None


def _unmet(response_format: str, found: Any) -> str | None:
    """The keyword of a schema that a value does not fulfil."""
    try:
        error = best_match(_validator(response_format).iter_errors(found))
    except Exception:  # what the library cannot judge was formed all the same
        return None
    return None if error is None else str(error.validator)


@lru_cache(maxsize=512)
def _of_calls(form: str) -> tuple[dict[str, str], bool, bool]:
    """The form of each function's arguments; whether a text without calls is right; whether
    several calls are."""
    asked = call_form(parsed(form)[1])
    forms = {
        name: orjson.dumps({"type": "json_schema", "schema": schema}).decode()
        for name, schema in asked.functions.items()
    }
    return forms, asked.may_answer, asked.many


@lru_cache(maxsize=512)
def _validator(response_format: str) -> Validator:
    """Nothing is fetched: a reference that leads out of the schema is an error.

    Patterns are left out, as Python's search can take for ever and knows other classes of
    characters than what formed the text; so are multiples, which it divides in binary.
    """
    schema: Any = parsed(response_format)[1]
    known = validator_for(schema, Draft202012Validator)
    others = {"pattern": _unjudged, "patternProperties": _unjudged, "multipleOf": _unjudged}
    further = known.VALIDATORS["additionalProperties"]

    def additional(judge: Any, value: Any, found: Any, of: Mapping[str, Any]) -> Iterator[Any]:
        return _unjudged() if "patternProperties" in of else further(judge, value, found, of)

    judging = extend(known, {**others, "additionalProperties": additional})
    made: Validator = judging(schema, registry=Registry())
    return made


def _unjudged(*_: Any) -> Iterator[Any]:
    return iter(())
