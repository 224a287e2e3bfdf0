"""What Delta and Iceberg tables have in common. Imports neither library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

JOB, ROWS = "specbatch_job", "specbatch_rows_sha256"  # in the log of a table: of a commit of ours


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file of a table.

    `values`: of columns that the file itself may lack, as text or in its own type; None is null.
    """

    uri: str
    values: Mapping[str, Any] = field(default_factory=dict)


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
