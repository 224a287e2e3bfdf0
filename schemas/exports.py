"""What can be exported from a job, an export's options and its result. Imports no pyarrow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from specbatch.schemas.errors import UsageError
from specbatch.schemas.schemes import why_not_writable


class ExportKind(StrEnum):
    """The sets that can be exported; `export_arrow.py` defines their columns."""

    COMPLETIONS = "completions"  # one row per completion, with everything that is kept of it
    TOKENS = "tokens"  # one row per token
    CORRECTIONS = "corrections"  # one row per completion, to train a draft model on
    COSTS = "costs"  # one row per completion: device time by kind, and its price
    TIME = "time"  # one row per attempt at a group and worker session, lost ones too


@dataclass(frozen=True, slots=True)
class Selection:
    """Which completions `corrections` takes. The other sets take all of them."""

    proposer: str | None = None  # only completions that this one drafted for
    tag: str | None = None
    min_rejections: int | None = None  # None: 1

    @property
    def fewest(self) -> int:
        return 1 if self.min_rejections is None else self.min_rejections


@dataclass(frozen=True, slots=True)
class ExportOrder:
    """What to export, and where to.

    `to` is a file if it ends in `.parquet`, else a folder or prefix of numbered parts with a
    manifest. `overwrite` allows replacing an earlier export; `so_far` allows exporting the finished
    part of a running job.
    """

    kind: ExportKind
    to: str
    selection: Selection = Selection()
    overwrite: bool = False
    so_far: bool = False

    def __post_init__(self) -> None:
        if not self.to.strip():
            raise UsageError(
                "--to is empty: name a file ending in .parquet, a folder or an s3:// prefix"
            )
        if words := why_not_writable(self.to):
            raise UsageError(f"--to {self.to}: {words}")
        if self.kind is not ExportKind.CORRECTIONS and self.selection != Selection():
            raise UsageError(
                f"--proposer, --tag and --min-rejections choose corrections; {self.kind} are "
                "exported whole"
            )


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One file; `name` is relative to the folder or prefix."""

    name: str
    rows: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export. `left_out` counts omitted completions by reason."""

    job_id: str
    kind: ExportKind
    to: str
    files: tuple[WrittenFile, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def kind_of(name: str) -> ExportKind:
    """The set of this name. Raises a `UsageError` that lists the sets."""
    try:
        return ExportKind(name)
    except ValueError:
        raise UsageError(
            f"there is no export called {name!r}: --what is one of {', '.join(ExportKind)}"
        ) from None
