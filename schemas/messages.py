"""Broker messages: small, schema-checked, and only hints, because the store decides."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from specbatch.schemas.records import Stage

MAX_OUTPUT_TOKENS = 8192  # that a refill may continue from
MAX_HINT_TOKENS = 4096
MAX_LATE_TOKENS = 1024
HINT_EXPIRES_SEC = 30.0  # a sequence is elsewhere by then, or done
# Bytes of a body before it is parsed; twice what the largest of its kind has.
MAX_WORK_BYTES = 2 << 10
MAX_REFILL_BYTES = 256 << 10
MAX_HINT_BYTES = 128 << 10

JobId = Annotated[str, Field(pattern=r"^[0-9a-z]{8,40}$")]
Index = Annotated[int, Field(ge=0, lt=2**31)]
RowIndex = Annotated[int, Field(ge=0, lt=2**63)]


class WorkMessage(BaseModel):
    """ "Look at this unit of work." A late, doubled or forged one claims nothing it should not."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job_id: JobId
    stage: Stage
    group_index: Index | None = None


class RefillMessage(BaseModel):
    """Asks for a continuation. Names a prompt by its place in the store, never by a path."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job_id: JobId
    group_index: Index
    row_index: RowIndex
    sample_index: Index
    output_ids: tuple[Index, ...] = Field(max_length=MAX_OUTPUT_TOKENS)
    late: int = Field(  # tokens that will be decided by the time of the answer
        default=0, ge=0, le=MAX_LATE_TOKENS
    )
    reply_to: str = Field(pattern=r"^hints\.[0-9a-f]{32}$")


class HintMessage(BaseModel):
    """A guess at what follows the first `position` output tokens; every token is verified."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job_id: JobId
    row_index: RowIndex
    sample_index: Index
    position: Index
    token_ids: tuple[Index, ...] = Field(min_length=1, max_length=MAX_HINT_TOKENS)
