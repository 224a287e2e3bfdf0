"""Delta and Iceberg tables as a spec names them: which snapshot is read, and what is written where.

A Delta table is a folder, or a prefix of S3. An Iceberg table is `iceberg://CATALOG/NAMESPACE.TABLE`,
and pyiceberg's own configuration knows the catalog.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from specbatch.schemas.uris import TableUri

TableKind = Literal["delta", "iceberg"]
DELTA: TableKind = "delta"
ICEBERG: TableKind = "iceberg"
LAST = "last"  # of `input.since`: the snapshot that the last finished job of this name has read
_SAMPLE = "sample_index"
JOB_COLUMN = "job"  # of an output table: the id of the job that wrote the row

# Keys of a job's report. The first three are pinned there where the submitter could not read the
# table; the last is the snapshot that the job has committed.
INPUT_SNAPSHOT, INPUT_SINCE = "input_snapshot", "input_since"
INPUT_TABLE_ID = "input_table_id"
OUTPUT_SNAPSHOT = "output_snapshot"

_ICEBERG_NAME = re.compile(r"iceberg://([\w-]+)/([\w-]+(?:\.[\w-]+)+)")
Column = Annotated[str, Field(min_length=1)]


def is_iceberg(uri: str) -> bool:
    return uri.startswith("iceberg://")


def iceberg_name(uri: str) -> tuple[str, str]:
    """Catalog, and namespace with table. Raises `ValueError`."""
    found = _ICEBERG_NAME.fullmatch(uri)
    if found is None:
        raise ValueError("an Iceberg table is named iceberg://CATALOG/NAMESPACE.TABLE")
    return found[1], found[2]


def kind_of_input(uri: str, format: str) -> TableKind | None:
    """The kind of table that an input names; None for files."""
    if is_iceberg(uri):
        return ICEBERG
    return DELTA if format == DELTA else None


def input_problem(
    uri: str, format: str, snapshot: int | None, since: int | str | None
) -> str | None:
    """Why these fields of an input contradict one another; None: they do not."""
    if is_iceberg(uri):
        try:
            iceberg_name(uri)
        except ValueError as error:
            return str(error)
        if format not in ("auto", ICEBERG):
            return f"iceberg:// names an Iceberg table: leave format {format} out"
    elif format == ICEBERG:
        return "an Iceberg table is named iceberg://CATALOG/NAMESPACE.TABLE"
    kind = kind_of_input(uri, format)
    for name, value in (("snapshot", snapshot), ("since", since)):
        if value is not None and kind is None:
            return f"{name} is for tables: set format to delta, or name iceberg://CATALOG/TABLE"
    if kind == DELTA and isinstance(since, int) and snapshot is not None and since > snapshot:
        return f"since {since} comes after snapshot {snapshot}"
    return None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a job reads of a table: a snapshot, or only the rows that were added since another."""

    number: int  # a version of Delta, an id of Iceberg
    since: int | None = None
    table_id: str | None = None  # the table's own, which another one of its name has not

    @classmethod
    def of_report(cls, report: Mapping[str, Any]) -> Snapshot | None:
        """What ingest has pinned, if it had to."""
        if INPUT_SNAPSHOT not in report:
            return None
        since = report.get(INPUT_SINCE)
        number = int(report[INPUT_SNAPSHOT])
        return cls(number, None if since is None else int(since), report.get(INPUT_TABLE_ID))

    def to_report(self) -> dict[str, str]:
        """As text: an id of Iceberg has more digits than numbers of JSON have."""
        found = {
            INPUT_SNAPSHOT: str(self.number),
            INPUT_SINCE: None if self.since is None else str(self.since),
            INPUT_TABLE_ID: self.table_id,
        }
        return {name: value for name, value in found.items() if value is not None}

    def is_of(self, table_id: str) -> bool:
        """Whether it is of the table with this id, as far as that was kept."""
        return self.table_id in (None, table_id)

    def to_facts(self) -> dict[str, int]:
        """For a manifest."""
        found = {"snapshot": self.number}
        return found if self.since is None else {**found, "since": self.since}

    def words(self, kind: TableKind) -> str:
        """As `version 7, rows since version 3`."""
        word = words_of(kind)[1]
        since = "" if self.since is None else f", rows since {word} {self.since}"
        return f"{word} {self.number}{since}"


def words_of(kind: TableKind) -> tuple[str, str]:
    """What its library's users call the kind of table, and a snapshot of it."""
    return ("Delta table", "version") if kind == DELTA else ("Iceberg table", "snapshot")


class TableSpec(BaseModel):
    """A table that gets the finished rows, in one commit, just before the manifest."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    uri: TableUri = Field(
        min_length=1, description="folder or s3:// of a Delta table, or iceberg://CATALOG/TABLE"
    )
    mode: Literal["append", "merge"] = Field(
        default="append", description="merge: a row replaces the one with the same key"
    )
    key: tuple[Column, ...] = Field(
        default=("id", _SAMPLE),
        min_length=1,
        description="of merge: columns that name a row",
    )
    partition_by: tuple[Column, ...] = Field(
        default=(), description="columns by which a table is partitioned when it is created"
    )

    @property
    def kind(self) -> TableKind:
        return ICEBERG if is_iceberg(self.uri) else DELTA

    def needs_ids(self, own: Collection[str]) -> bool:
        """Whether rows of two jobs would have one key if the ids were numbers of rows. `own`: the
        columns that every output has."""
        return self.mode == "merge" and "id" in self.key and set(self.key) <= set(own)

    def key_problem(self, samples: int) -> str | None:
        """Why so many samples of a row cannot be told apart by the key; None: they can."""
        if self.mode != "merge" or samples == 1 or _SAMPLE in self.key:
            return None
        return (
            f"output.table.key {', '.join(self.key)} is the same for {samples} samples of a row: "
            f"add {_SAMPLE} to it"
        )

    @field_validator("key", "partition_by", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _name_is_whole(self) -> TableSpec:
        if self.kind == ICEBERG:
            iceberg_name(self.uri)
        for name in ("key", "partition_by"):
            columns = getattr(self, name)
            if len(set(columns)) < len(columns):
                raise ValueError(f"a column occurs twice in {name}")
        if self.mode == "merge" and self.key == (JOB_COLUMN,):
            raise ValueError(
                f"key {JOB_COLUMN} alone is the same for all rows of a job: add columns that tell "
                f"its rows apart, as id and {_SAMPLE}"
            )
        return self
