"""What Delta and Iceberg tables have in common. Imports neither library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specbatch.pipeline.storage.objects import join, tidy
from specbatch.schemas.errors import InputError

JOB, ROWS = "specbatch_job", "specbatch_rows_sha256"  # in the log of a table: of a commit of ours


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file of a table.

    `values`: of columns that the file itself may lack, as text or in its own type; None is null.
    """

    uri: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class AddedFiles:
    """The files of rows that were added, one commit after the other; by their places.

    Compaction writes such rows into another file, and later ones are taken from where they were
    added. So it is not known which are gone when a compacted file is.
    """

    files: dict[str, Any] = field(default_factory=dict)
    _compacted: set[str] = field(default_factory=set)

    def compact(self, added: Iterable[str], removed: Iterable[str]) -> None:
        if any(place in self.files or place in self._compacted for place in removed):
            self._compacted.update(added)

    def change(self, added: Mapping[str, Any], removed: Iterable[str]) -> bool:
        """Returns whether what is left is known."""
        gone = set(removed)
        for place in gone:
            self.files.pop(place, None)
        self.files.update(added)
        return self._compacted.isdisjoint(gone)


@dataclass(frozen=True, slots=True)
class Commit:
    """What tells one publication from another: who publishes, and a digest of the rows."""

    job_id: str
    rows_sha256: str

    @property
    def number(self) -> int:
        """63 bits of the digest: Delta keeps such a number of each application's last commit."""
        return int(self.rows_sha256[:16], 16) >> 1

    @property
    def properties(self) -> dict[str, str]:
        return {JOB: self.job_id, ROWS: self.rows_sha256}


def inside(uri: str, place: str, roots: Iterable[str]) -> str:
    """A data file that a table's log names. Raises `InputError` unless it lies below a root:
    whoever writes a log could name any file that a worker may read."""
    whole = tidied(place)
    is_below = any(whole.startswith(join(tidied(root), "")) for root in roots)
    if not is_below or ".." in whole.split("/"):
        raise InputError(
            f"file {place} lies outside of table {uri}, which names it, and is not read: copy the "
            "table into a new one"
        )
    return whole


def tidied(uri: str) -> str:
    """As `tidy`, with one name for S3."""
    return tidy(uri).replace("s3a://", "s3://", 1)
