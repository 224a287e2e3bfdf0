"""Where a job may be worked on: what its spec asks for, and where a worker is."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field, field_validator

from specbatch.schemas.spec_part import Part

DEFAULT_POOL = "default"
SPOT = "spot"  # the tenure of devices that may be taken away

REGION = r"^[^\s/,\"\\]{1,64}$"
Region = Annotated[str, Field(pattern=REGION)]


class Site(NamedTuple):
    """Where a worker is, for claims to compare."""

    region: str
    is_spot: bool = False


class PlacementSpec(Part):
    """Which workers may have a job's rows, at any stage."""

    regions: tuple[Region, ...] = Field(
        default=(),
        max_length=64,
        description="only workers in these regions read, draft, verify, record and publish; empty: "
        "any",
    )
    spot: bool = Field(
        default=True, description="false: only workers whose devices cannot be taken away"
    )

    @field_validator("regions", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        if isinstance(value, str):
            value = [name for part in value.split(",") if (name := part.strip())]
        return tuple(dict.fromkeys(value)) if isinstance(value, list | tuple) else value

    def allows(self, site: Site) -> bool:
        """Whether a worker there may have the job's rows."""
        return (not self.regions or site.region in self.regions) and (self.spot or not site.is_spot)

    @property
    def words(self) -> str:
        """What it asks for, as the end of a sentence; empty: nothing."""
        where = [f"in region {' or '.join(self.regions)}"] if self.regions else []
        return " ".join(where if self.spot else [*where, "not on spot"])


ANYWHERE = PlacementSpec()
