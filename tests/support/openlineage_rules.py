"""What OpenLineage's specification asks of a run event and of the facets that we send, as a schema.

Its own schema files are not in a package that can be installed, so these are its rules in our words
(core 2-0-2, facets of the versions in `VERSIONS`). They ask for no less than the files do, formats
included. They ask for more where we always say more, and they refuse fields and facets that we do
not send: a new one needs its rules here, and so does a new version.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker, ValidationError

from specbatch.pipeline.runtime.lineage_events import SCHEMA_FILE
from support.tree import ROOT

Schema = dict[str, Any]

CORE = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
VERSIONS = {
    "ColumnLineageDatasetFacet": "1-2-0",
    "DatasetVersionDatasetFacet": "1-0-1",
    "ErrorMessageRunFacet": "1-0-1",
    "InputStatisticsInputDatasetFacet": "1-0-0",
    "JobTypeJobFacet": "2-0-4",
    "OutputStatisticsOutputDatasetFacet": "1-0-2",
    "ParentRunFacet": "1-2-0",
    "ProcessingEngineRunFacet": "1-1-1",
    "SchemaDatasetFacet": "1-2-0",
    "TagsRunFacet": "1-0-0",
}
PUBLISHED = json.loads((ROOT / "docs" / SCHEMA_FILE).read_text())  # of the facet of our own

# --- formats --------------------------------------------------------------------------------
# Our own, for jsonschema leaves out those whose packages are not there.
FORMATS = FormatChecker(formats=())
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
_IN_PATH = r"(?:[A-Za-z0-9._~:/@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
_AFTER = rf"(?:{_IN_PATH}|\?)*"
_URI = re.compile(
    rf"[A-Za-z][A-Za-z0-9+.-]*:(//\[[0-9A-Fa-f:.]+\])?{_IN_PATH}*(\?{_AFTER})?(#{_AFTER})?"
)


def _is_uuid(value: object) -> bool:
    return not isinstance(value, str) or _UUID.fullmatch(value) is not None


def _is_uri(value: object) -> bool:
    return not isinstance(value, str) or _URI.fullmatch(value) is not None


def _is_time(value: object) -> bool:
    if not isinstance(value, str):
        return True
    return _TIME.fullmatch(value) is not None and datetime.fromisoformat(value).tzinfo is not None


FORMATS.checks("uuid")(_is_uuid)
FORMATS.checks("uri")(_is_uri)
FORMATS.checks("date-time", raises=ValueError)(_is_time)


# --- words ----------------------------------------------------------------------------------
TEXT: Schema = {"type": "string", "minLength": 1}
# What the client writes out where we say nothing.
EMPTY: Schema = {"type": "array", "maxItems": 0}
NONE: Schema = {"type": "object", "maxProperties": 0}
COUNT: Schema = {"type": "integer", "minimum": 0}
URI: Schema = {"type": "string", "format": "uri"}
UUID: Schema = {"type": "string", "format": "uuid"}
TIME: Schema = {"type": "string", "format": "date-time"}


def record(required: Mapping[str, Schema], /, **more: Schema) -> Schema:
    """An object with these fields and perhaps more of them, but no others."""
    return {
        "type": "object",
        "properties": {**required, **more},
        "required": list(required),
        "additionalProperties": False,
    }


def facet(name: str, required: Mapping[str, Schema], /, **more: Schema) -> Schema:
    """A facet of the specification, which says of which version it is."""
    place = f"https://openlineage.io/spec/facets/{VERSIONS[name]}/{name}.json#/$defs/{name}"
    return record({"_producer": URI, "_schemaURL": {"const": place}, **required}, **more)


def facets(**known: Schema) -> Schema:
    return record({}, **known)


def listed(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def transformation(kind: str, subtypes: list[str]) -> Schema:
    return record(
        {"type": {"const": kind}},
        subtype={"enum": subtypes},
        description=TEXT,
        masking={"type": "boolean"},
    )


# --- data sets ------------------------------------------------------------------------------
PLACE: Mapping[str, Schema] = {"namespace": TEXT, "name": TEXT}
COLUMN_NAME: Schema = {"type": "string"}  # a CSV file may have one that is empty
FIELD = record({"name": COLUMN_NAME}, type=TEXT, description=TEXT, fields=EMPTY)
# The subtypes are those of its documentation; the schema takes any text.
TRANSFORMATION: Schema = {
    "oneOf": [
        transformation("DIRECT", ["IDENTITY", "TRANSFORMATION", "AGGREGATION"]),
        transformation("INDIRECT", ["JOIN", "GROUP_BY", "FILTER", "SORT", "WINDOW", "CONDITIONAL"]),
    ]
}
INPUT_FIELD = record({**PLACE, "field": COLUMN_NAME}, transformations=listed(TRANSFORMATION))
COLUMN = record({"inputFields": listed(INPUT_FIELD)})
OF_DATASET = facets(
    schema=facet("SchemaDatasetFacet", {"fields": listed(FIELD)}),
    version=facet("DatasetVersionDatasetFacet", {"datasetVersion": TEXT}),
    columnLineage=facet(
        "ColumnLineageDatasetFacet",
        {"fields": {"type": "object", "additionalProperties": COLUMN}},
        dataset=EMPTY,
    ),
)
READ = facet("InputStatisticsInputDatasetFacet", {}, rowCount=COUNT, size=COUNT, fileCount=COUNT)
WRITTEN = facet(
    "OutputStatisticsOutputDatasetFacet", {"rowCount": COUNT}, size=COUNT, fileCount=COUNT
)

# --- the run and the job --------------------------------------------------------------------
ENGINE = facet(
    "ProcessingEngineRunFacet", {"version": TEXT}, name=TEXT, openlineageAdapterVersion=TEXT
)
PARENT = facet(
    "ParentRunFacet",
    {"run": record({"runId": UUID}, facets=NONE), "job": record(PLACE, facets=NONE)},
)
ERROR = facet(
    "ErrorMessageRunFacet", {"message": TEXT, "programmingLanguage": TEXT}, stackTrace=TEXT
)
# The client adds its version to each run by itself.
TAGS = facet("TagsRunFacet", {}, tags=listed(record({"key": TEXT, "value": TEXT}, source=TEXT)))
JOB_TYPE = facet(
    "JobTypeJobFacet",
    {"processingType": {"enum": ["BATCH", "STREAMING", "SERVICE"]}, "integration": TEXT},
    jobType=TEXT,
)
OWN: Schema = {
    "$ref": "#/$defs/SpecbatchGenerationRunFacet",
    "properties": {
        "_schemaURL": {"const": f"{PUBLISHED['$id']}#/$defs/SpecbatchGenerationRunFacet"}
    },
    "unevaluatedProperties": False,
}

EVENT = record(
    {
        "eventType": {"enum": ["START", "COMPLETE", "ABORT", "FAIL"]},
        "eventTime": TIME,
        "producer": URI,
        "schemaURL": {"const": CORE},
        "run": record(
            {"runId": UUID},
            facets=facets(
                processing_engine=ENGINE,
                parent=PARENT,
                errorMessage=ERROR,
                specbatch_generation=OWN,
                tags=TAGS,
            ),
        ),
        "job": record(PLACE, facets=facets(jobType=JOB_TYPE)),
    },
    inputs=listed(record(PLACE, facets=OF_DATASET, inputFacets=facets(inputStatistics=READ))),
    outputs=listed(record(PLACE, facets=OF_DATASET, outputFacets=facets(outputStatistics=WRITTEN))),
) | {"$defs": PUBLISHED["$defs"]}
RULES = Draft202012Validator(EVENT, format_checker=FORMATS)


def checked(event: dict[str, Any]) -> dict[str, Any]:
    """The event. Raises jsonschema's `ValidationError` where the specification is not met."""
    RULES.validate(event)
    for column in _unknown_columns(event):
        raise ValidationError(f"columnLineage names {column}, which no schema facet has")
    return event


def _unknown_columns(event: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Columns that a `columnLineage` names and no `schema` has: it may only name those."""
    there = {
        (one["namespace"], one["name"], field["name"])
        for one in (*event["inputs"], *event["outputs"])
        for field in one["facets"].get("schema", {"fields": []})["fields"]
    }
    for one in event["outputs"]:
        lineage = one["facets"].get("columnLineage", {"fields": {}})["fields"]
        named = {(one["namespace"], one["name"], name) for name in lineage}
        for column in lineage.values():
            named |= {(of["namespace"], of["name"], of["field"]) for of in column["inputFields"]}
        yield from sorted(named - there)
