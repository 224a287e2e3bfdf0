"""What a field takes, in words, read from its JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specbatch.tools.site.markdown import code

Schema = Mapping[str, Any]


class Words:
    """Of one schema with its definitions."""

    def __init__(self, whole: Schema) -> None:
        self._defs: Mapping[str, Schema] = whole.get("$defs", {})

    def resolved(self, schema: Schema) -> Schema:
        """What a reference leads to."""
        if "$ref" in schema:
            return self._defs[str(schema["$ref"]).rsplit("/", 1)[1]]
        return schema

    def takes(self, schema: Schema) -> str:
        """`integer from 0 to 32, or null`."""
        schema = self.resolved(schema)
        for one_of in ("anyOf", "oneOf"):
            if one_of in schema:
                return " or ".join(self.takes(part) for part in schema[one_of])
        if "const" in schema:
            return code(schema["const"])
        if "enum" in schema:
            return ", ".join(code(value) for value in schema["enum"])
        return self._by_type(schema)

    def _by_type(self, schema: Schema) -> str:
        kind = schema.get("type")
        if kind == "string":
            return "text" + _text_bounds(schema)
        if kind in ("integer", "number"):
            return f"{kind}{_number_bounds(schema)}"
        if kind == "boolean":
            return "true or false"
        if kind == "null":
            return "null"
        if kind == "array":
            return self._list(schema)
        if kind == "object":
            return self._mapping(schema)
        return "anything"

    def _list(self, schema: Schema) -> str:
        if "prefixItems" in schema:
            return "[" + ", ".join(self.takes(part) for part in schema["prefixItems"]) + "]"
        most = f", {schema['maxItems']:,} at most" if "maxItems" in schema else ""
        return f"list of {self.takes(schema['items'])}{most}"

    def _mapping(self, schema: Schema) -> str:
        for pattern, value in schema.get("patternProperties", {}).items():
            return f"mapping of {code(pattern)} to {self.takes(value)}"
        values = schema.get("additionalProperties")
        if isinstance(values, Mapping):
            return f"mapping of text to {self.takes(values)}"
        return "a section"


def default_of(schema: Schema, required: bool) -> str:
    """The default, as YAML would have it."""
    if required:
        return "**required**"
    if "default" not in schema:
        return code("{}")
    return code(json.dumps(schema["default"]))


def _text_bounds(schema: Schema) -> str:
    said = []
    if schema.get("minLength"):
        said.append("not empty")
    if "maxLength" in schema:
        said.append(f"{schema['maxLength']:,} characters at most")
    if "pattern" in schema:
        said.append(f"like {code(schema['pattern'])}")
    return f" ({', '.join(said)})" if said else ""


def _number_bounds(schema: Schema) -> str:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f" from {low:,} to {high:,}"
    said = []
    if low is not None:
        said.append(f"from {low:,}")
    if above is not None:
        said.append(f"above {above:,}")
    if high is not None:
        said.append(f"up to {high:,}")
    if below is not None:
        said.append(f"below {_short(below)}")
    return " " + " ".join(said) if said else ""


def _short(value: float) -> str:
    exponent = int(value).bit_length() - 1
    return f"2^{exponent}" if exponent > 30 and value == 2**exponent else f"{value:,}"
