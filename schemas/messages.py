"""Broker messages. Small, schema-checked, and worth nothing by themselves: the store decides."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from specbatch.schemas.records import Stage


class WorkMessage(BaseModel):
    """ "Look at this unit of work." A late, doubled or forged one claims nothing it should not."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job_id: str = Field(pattern=r"^[0-9a-z]{8,40}$")
    stage: Stage
    group_index: int | None = Field(default=None, ge=0, lt=2**31)
