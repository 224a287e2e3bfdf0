"""Whether a finished text has the form that was asked for, judged apart from what enforced it.

A problem is told without a word of the text: it comes into columns and logs that outlive it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry

from specbatch.schemas.response_format import parsed

_PREFIX = "the output does not have the form that was asked for: "


def problem_of(response_format: str, text: str, ended: bool) -> str | None:
    """Why a text does not have a form, in a sentence; None: it has.

    `ended`: its end is the model's own, not a stop string or the limit of tokens.
    """
    kind, _ = parsed(response_format)
    if kind not in ("json_object", "json_schema"):
        return None if ended else f"{_PREFIX}it was cut before its end"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        why = "it is not JSON" if ended else "it was cut before its end"
        return _PREFIX + why
    if kind == "json_object":
        return None if isinstance(found, dict) else f"{_PREFIX}it is not a JSON object"
    error = best_match(_validator(response_format).iter_errors(found))
    if error is None:
        return None
    place = "/".join(map(str, error.absolute_schema_path))
    return f"{_PREFIX}`{place}` of the schema is not fulfilled"


@lru_cache(maxsize=512)
def _validator(response_format: str) -> Validator:
    """Nothing is fetched: a reference that leads out of the schema is an error."""
    schema: Any = parsed(response_format)[1]
    made: Validator = validator_for(schema, Draft202012Validator)(schema, registry=Registry())
    return made
