"""Lineage of jobs: whether it is told to OpenLineage, and what the store keeps to tell it.

`pipeline/runtime/lineage.py` makes OpenLineage's events of it. Nothing here holds a text of a
prompt or of an output: names of files and columns, types, counts and digests.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator

log = logging.getLogger(__name__)

TARGET = "(openlineage)"  # of its notifications; names of other targets have no parentheses
INPUT, OUTPUT = "lineage_input", "lineage_output"  # keys of a job's report
MOST_FIELDS = 200  # of a dataset that are told
PARENT_VARIABLE = "OPENLINEAGE_PARENT_ID"

_FILES = (Path("openlineage.yml"), Path.home() / ".openlineage" / "openlineage.yml")
_VARIABLES = ("OPENLINEAGE_URL", "OPENLINEAGE__TRANSPORT__TYPE", "OPENLINEAGE__TRANSPORT")

Fields = tuple[tuple[str, str | None], ...]  # name and type; None: the format has no types


# --- the switch -----------------------------------------------------------------------------
def is_configured(environment: Mapping[str, str] | None = None) -> bool:
    """Whether OpenLineage's own configuration names where events go."""
    variables = os.environ if environment is None else environment
    if variables.get("OPENLINEAGE_DISABLED", "").lower().strip() == "true":
        return False
    files = (Path(variables.get("OPENLINEAGE_CONFIG") or os.devnull), *_FILES)
    return any(map(variables.get, _VARIABLES)) or any(path.is_file() for path in files)


def is_installed() -> bool:
    """Whether OpenLineage's client is there, without importing it."""
    return find_spec("openlineage") is not None and find_spec("openlineage.client") is not None


def is_told_here() -> bool:
    """Whether this process's jobs are told to OpenLineage."""
    return is_configured() and is_installed()


def namespace() -> str:
    """The namespace of jobs, by OpenLineage's variable."""
    return os.environ.get("OPENLINEAGE_NAMESPACE") or "default"


# --- what ingest and publish note -----------------------------------------------------------
@dataclass(frozen=True, slots=True)
class InputFacts:
    """The files that a job reads, and which of their columns."""

    fields: Fields
    prompt: tuple[str, ...]  # the columns that prompts are made of
    id: str | None
    seed: str | None
    sampling: str | None
    files: int
    size_bytes: int
    version: str  # a digest of the files' names and versions

    def noted(self) -> dict[str, Any]:
        """As a part of the job's report."""
        return {INPUT: asdict(self)}


@dataclass(frozen=True, slots=True)
class OutputFacts:
    """The files that a job published."""

    fields: Fields
    kept: tuple[str, ...]  # columns carried over from the input
    rows: int
    files: int
    size_bytes: int

    def noted(self) -> dict[str, Any]:
        """As a part of the job's report."""
        return {OUTPUT: asdict(self)}


def input_in(report: Mapping[str, Any]) -> InputFacts | None:
    """What ingest noted; None: nothing yet."""
    return InputFacts(**report[INPUT]) if report.get(INPUT) else None


def output_in(report: Mapping[str, Any]) -> OutputFacts | None:
    """What publish noted; None: nothing yet."""
    return OutputFacts(**report[OUTPUT]) if report.get(OUTPUT) else None


# --- the run that a job belongs to ----------------------------------------------------------
class Parent(NamedTuple):
    """A run of another program that a job is a part of."""

    namespace: str
    name: str
    run_id: str


_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"  # not all that `UUID` reads
_PARENT = re.compile(rf"([^/]+)/(.+)/({_UUID})")


def parent_in(text: str | None) -> Parent | None:
    """The parent that `namespace/job name/run id` names; None for anything else."""
    found = _PARENT.fullmatch(text or "")
    return None if found is None else Parent(*found.groups())


def parent_here() -> str | None:
    """The parent that this process's environment names; None: none, or nothing of that form."""
    named = os.environ.get(PARENT_VARIABLE)
    if not named:
        return None
    if parent_in(named) is None:  # it may be meant for another program: the job does without
        log.warning("%s is not NAMESPACE/JOB NAME/RUN ID with a UUID: left out", PARENT_VARIABLE)
        return None
    return named


def _check_parent(value: str | None) -> str | None:
    if value is not None and parent_in(value) is None:
        raise ValueError("should be NAMESPACE/JOB NAME/RUN ID, and the run id a UUID")
    return value


ParentId = Annotated[str | None, AfterValidator(_check_parent)]
