"""Maps rows of the store's tables to records and back, field by field.

Rows are anything with the columns as attributes; values are plain dicts for inserts.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

import orjson

from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.provenance import NO_PROVENANCE
from specbatch.schemas.records import (
    Artefact,
    CompletionRecord,
    DueWork,
    GroupWork,
    JobRow,
    JobState,
    JobWork,
    Lease,
    NewGroup,
    NewJob,
    Prompts,
    RejectedRow,
    SourcePosition,
    Stage,
)
from specbatch.schemas.speculation import (
    AcceptanceCount,
    AcceptanceDay,
    Decision,
    DecisionAction,
    PastOutput,
)

T = TypeVar("T")

# Columns of a new job that are its fields as they are.
_OF_NEW_JOB = (
    *("job_id", "name", "tenant", "spec_digest", "verifier", "proposer", "output_uri"),
    *("workspace_uri", "priority", "budget_usd", "sealed_spec", "numeric_class"),
    "model_fingerprint",
)
# Columns of a completion that no output has.
PASSES = ("steps", "pass_ticks", "sources", "makers", "drafted", "rejected")
DETAILS = ("origins", "proposed_at_depth", "accepted_at_depth", *PASSES)


def as_float32(values: Iterable[float]) -> tuple[float, ...]:
    """The values rounded to single precision, as every store keeps them; infinities become NaN."""
    return tuple(float32_array(values))


def float32_array(values: Iterable[float]) -> array[float]:
    """The same as an array of four bytes each."""
    rounded = array("f", values)
    if math.isfinite(sum(rounded)):  # of single numbers in double precision: then all of them are
        return rounded
    return array("f", (v if math.isfinite(v) else math.nan for v in rounded))


def as_kept(record: CompletionRecord) -> CompletionRecord:
    """The record as every store returns it: log-probabilities in single precision."""
    tops = record.top_logprobs
    return replace(
        record,
        logprobs=as_float32(record.logprobs),
        top_logprobs=tops and tuple((ids, as_float32(values)) for ids, values in tops),
    )


def without_details(record: CompletionRecord) -> CompletionRecord:
    """The published part of the record; see `Store.completions`."""
    logprobs = () if record.top_logprobs is None else record.logprobs
    own = (name for name in DETAILS if name not in PASSES)
    empty: dict[str, Any] = dict.fromkeys(own, ())
    return replace(record, logprobs=logprobs, provenance=NO_PROVENANCE, **empty)


# --- to the store ---------------------------------------------------------------------------


def job_values(job: NewJob, now: Any) -> dict[str, Any]:
    """Values of a new job: queued, its input still to be read."""
    return {
        **{name: getattr(job, name) for name in _OF_NEW_JOB},
        "spec": dict(job.spec),
        "idempotency_key": job.idempotency_key or None,
        "deadline_at": None if job.deadline_sec is None else now + job.deadline_sec,
        "state": JobState.QUEUED.value,
        "stage": Stage.INGEST.value,
        "created_at": now,
        "ready_at": now,
        "privacy": job.privacy.value,
    }


def whole_spec(spec: Mapping[str, Any], sealed_spec: str | None) -> Mapping[str, Any]:
    """The submitted spec if it can be read, else its public part."""
    return orjson.loads(sealed_spec) if sealed_spec else spec


def group_values(job_id: str, group: NewGroup, stage: Stage, now: Any) -> dict[str, Any]:
    """Values of a planned group that is ready at `stage`."""
    return {
        "job_id": job_id,
        "group_index": group.index,
        "stage": stage.value,
        "first_stage": group.first_stage.value,
        "source": asdict(group.source),
        "rows": group.rows,
        "prompt_tokens": group.prompt_tokens,
        "most_tokens": group.most_tokens,
        "most_row_tokens": group.most_row_tokens,
        "prompts": asdict(group.prompts),
        "ready_at": now,
    }


def rejected_values(job_id: str, row: RejectedRow) -> dict[str, Any]:
    return {"job_id": job_id, **asdict(row)}


def decision_values(job_id: str, decision: Decision) -> dict[str, Any]:
    return {"job_id": job_id, **asdict(decision), "action": decision.action.value}


# --- from the store -------------------------------------------------------------------------


def named(record: type[T], row: Any, **other: Any) -> T:
    """The record with the row's columns of the same names, but for the `other` values."""
    names = (field.name for field in fields(record) if field.name not in other)  # type: ignore[arg-type]  # T is a dataclass
    return record(**{name: getattr(row, name) for name in names}, **other)


def job_row(row: Any) -> JobRow:
    return named(
        JobRow,
        row,
        spec=whole_spec(row.spec, row.sealed_spec),
        state=JobState(row.state),
        stage=Stage(row.stage),
        groups_total=row.groups_total + row.groups_cut,
        paused=row.ingest_resumes_at is not None,
        privacy=PrivacyMode(row.privacy),
        model_parts=row.model_parts or {},
    )


def job_work(row: Any) -> JobWork:
    """A claimed job."""
    return JobWork(
        lease=_lease(row, None),
        next_group=row.groups_total,
        next_row=row.next_row,
        cursor=position(row.cursor),
    )


def group_work(row: Any) -> GroupWork:
    """A claimed group."""
    return GroupWork(
        lease=_lease(row, row.group_index),
        rows=row.rows,
        prompts=Artefact(**row.prompts),
        drafts=artefact(row.drafts),
        results=artefact(row.results),
        row_start=row.row_start,
        row_stop=row.row_stop,
        rows_kept=row.rows_kept,
        prompt_tokens=row.prompt_tokens,
        waited_sec=row.waited_sec,
    )


def prompts(row: Any) -> Prompts:
    """The file and rows of a group's prompts."""
    return Prompts(Artefact(**row.prompts), row.row_start, row.rows)


def _lease(row: Any, group_index: int | None) -> Lease:
    return Lease(
        job_id=row.job_id,
        group_index=group_index,
        stage=Stage(row.stage),
        token=row.generation,
        owner=row.lease_owner,
        attempt=row.attempts,
    )


def due_job(row: Any) -> DueWork:
    return DueWork(row.job_id, Stage(row.stage), None, priority=row.priority)


def due_group(row: Any) -> DueWork:
    """Proposing needs the job's proposer, verifying its verifier, recording neither."""
    stage = Stage(row.stage)
    model = {Stage.PROPOSE: row.proposer, Stage.VERIFY: row.verifier}.get(stage)
    return DueWork(row.job_id, stage, row.group_index, model, row.priority)


def rejected_row(row: Any) -> RejectedRow:
    return named(RejectedRow, row)


def decision(row: Any) -> Decision:
    return named(Decision, row, action=DecisionAction(row.action))


def acceptance_count(row: Any) -> AcceptanceCount:
    return AcceptanceCount(
        row.proposer,
        row.tag or None,
        row.agreed,
        row.tested,
        row.fingerprint,
        row.learned_at,
    )


def acceptance_day(row: Any) -> AcceptanceDay:
    return named(AcceptanceDay, row, tag=row.tag or None)


def past_output(row: Any) -> PastOutput:
    return PastOutput(row.job_id, row.row_id, row.sample_index, tuple(row.token_ids))


def artefact(values: Mapping[str, Any] | None) -> Artefact | None:
    return None if values is None else Artefact(**values)


def position(values: Mapping[str, Any] | None) -> SourcePosition | None:
    return None if values is None else SourcePosition(**values)
