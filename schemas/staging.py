"""Parts of an output that are written before its job is published, and where the next one begins.

A part has so many rows of the output, in input order. The samples of an input row may lie in two
parts, so a place between parts is an input row, and how many output rows of it lie before.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Where a part begins: `skip` output rows of input row `row_index` are in the parts before."""

    number: int
    row_index: int = 0
    skip: int = 0


FIRST_PLACE = PartPlace(0)


@dataclass(frozen=True, slots=True)
class PartClaim:
    """The right to write one part, until it is claimed again. `token` is in its file name."""

    job_id: str
    place: PartPlace
    token: str


@dataclass(frozen=True, slots=True)
class StagedPart:
    """A part that lies in the staging folder, as its writer noted it."""

    number: int
    token: str
    schema_version: int  # of the output's columns
    rows: int
    rejected: int  # of the rows: quarantined ones
    size_bytes: int
    sha256: str
    then: PartPlace  # where the next part begins
