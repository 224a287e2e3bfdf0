"""What OpenLineage's specification asks of a run event and of the facets that we send, as a schema.

Its own schema files are not in a package that can be installed, so these are its rules in our words
(core 2-0-2; facets as `_schemaURL` names them). Facets of other names are refused: a new one needs
its rules here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
# What the client writes out where we say nothing.
EMPTY: Schema = {"type": "array", "maxItems": 0}
NONE: Schema = {"type": "object", "maxProperties": 0}
COUNT: Schema = {"type": "integer", "minimum": 0}
URI: Schema = {"type": "string", "pattern": r"^[a-z][a-z0-9+.-]*://[^\s<>\"{}|\\^`]+$"}
UUID: Schema = {"type": "string", "pattern": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"}
TIME: Schema = {
    "type": "string",
    "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$",
}


def record(required: Mapping[str, Schema], **more: Schema) -> Schema:
    """An object with these fields and perhaps more of them, but no others."""
    return {
        "type": "object",
        "properties": {**required, **more},
        "required": list(required),
        "additionalProperties": False,
    }


def facet(required: Mapping[str, Schema], **more: Schema) -> Schema:
    return record({"_producer": URI, "_schemaURL": URI, **required}, **more)


def facets(**known: Schema) -> Schema:
    return record({}, **known)


def listed(item: Schema) -> Schema:
    return {"type": "array", "items": item}


PLACE: Mapping[str, Schema] = {"namespace": TEXT, "name": TEXT}
FIELD = record({"name": TEXT}, type=TEXT, description=TEXT, fields=EMPTY)
TRANSFORMATION = record(
    {"type": {"enum": ["DIRECT", "INDIRECT"]}},
    subtype=TEXT,
    description=TEXT,
    masking={"type": "boolean"},
)
INPUT_FIELD = record({**PLACE, "field": TEXT}, transformations=listed(TRANSFORMATION))
COLUMN = record({"inputFields": listed(INPUT_FIELD)})
OF_DATASET = facets(
    schema=facet({}, fields=listed(FIELD)),
    version=facet({"datasetVersion": TEXT}),
    columnLineage=facet(
        {"fields": {"type": "object", "additionalProperties": COLUMN}}, dataset=EMPTY
    ),
)
FIGURES = facet({}, rowCount=COUNT, size=COUNT, fileCount=COUNT)
OBJECT: Schema = {"type": "object"}
OWN = facet(dict.fromkeys(("job", "models", "numerics", "rows", "tokens", "cost"), OBJECT))
# The client adds its version to each run by itself.
TAGS = facet({}, tags=listed(record({"key": TEXT, "value": TEXT}, source=TEXT)))

EVENT = record(
    {
        "eventType": {"enum": ["START", "COMPLETE", "ABORT", "FAIL"]},
        "eventTime": TIME,
        "producer": URI,
        "schemaURL": {
            "const": "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
        },
        "run": record(
            {"runId": UUID},
            facets=facets(
                processing_engine=facet(
                    {"version": TEXT}, name=TEXT, openlineageAdapterVersion=TEXT
                ),
                parent=facet(
                    {"run": record({"runId": UUID}, facets=NONE), "job": record(PLACE, facets=NONE)}
                ),
                errorMessage=facet({"message": TEXT, "programmingLanguage": TEXT}, stackTrace=TEXT),
                specbatch_generation=OWN,
                tags=TAGS,
            ),
        ),
        "job": record(
            PLACE,
            facets=facets(
                jobType=facet(
                    {"processingType": {"enum": ["BATCH", "STREAMING"]}, "integration": TEXT},
                    jobType=TEXT,
                )
            ),
        ),
    },
    inputs=listed(record(PLACE, facets=OF_DATASET, inputFacets=facets(inputStatistics=FIGURES))),
    outputs=listed(record(PLACE, facets=OF_DATASET, outputFacets=facets(outputStatistics=FIGURES))),
)
RULES = Draft202012Validator(EVENT)


def checked(event: dict[str, Any]) -> dict[str, Any]:
    """The event. Raises jsonschema's `ValidationError` where the specification is not met."""
    RULES.validate(event)
    return event
