"""What schedules run besides jobs: by kind its options, and the function that does it.

A function is what the command of that name calls. It may import much, so it does that itself: a
scheduler reads this table and runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.settings import Settings

JOB = "job"  # the kind that is submitted, and done by workers


class Outcome(NamedTuple):
    """What a run found, in one sentence without texts of jobs."""

    said: str
    is_well: bool = True  # False: the time counts as failed, and is not tried again


@dataclass(frozen=True, slots=True)
class Kind:
    """`run(options, settings, store, logical_at)` raises what commands raise."""

    options: type[BaseModel]
    run: Callable[[Any, Settings, Store, float], Outcome]


class Options(BaseModel):
    """Fields of `options` in a schedule file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PurgeOptions(Options):
    tenant: str | None = Field(default=None, description="only this tenant's jobs")
    output: bool = Field(default=False, description="delete the files of outputs as well")


def purge(options: PurgeOptions, settings: Settings, store: Store, _logical_at: float) -> Outcome:
    """What retention says is due."""
    from specbatch.pipeline.operations.purging import purge_due

    return Outcome(*purge_due(settings, store, options.tenant, options.output))


KINDS: Mapping[str, Kind] = {
    "purge": Kind(PurgeOptions, purge),
}
