"""Maps rows of the store's tables to records and back, field by field.

Rows are anything with the columns as attributes; values are plain dicts for inserts.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

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
    Decision,
    DecisionAction,
    PastOutput,
)

# Columns of a completion that no output has.
PASSES = ("steps", "pass_ticks", "sources", "makers", "drafted", "rejected")
DETAILS = ("origins", "proposed_at_depth", "accepted_at_depth", *PASSES)


def as_float32(values: Iterable[float]) -> tuple[float, ...]:
    """The values rounded to single precision, as every store keeps them; infinities become NaN."""
    rounded = array("f", values)
    if math.isfinite(sum(rounded)):  # of single numbers in double precision: then all of them are
        return tuple(rounded)
    return tuple(v if math.isfinite(v) else math.nan for v in rounded)


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
        "job_id": job.job_id,
        "name": job.name,
        "tenant": job.tenant,
        "spec": dict(job.spec),
        "spec_digest": job.spec_digest,
        "verifier": job.verifier,
        "proposer": job.proposer,
        "output_uri": job.output_uri,
        "workspace_uri": job.workspace_uri,
        "idempotency_key": job.idempotency_key or None,
        "priority": job.priority,
        "deadline_at": None if job.deadline_sec is None else now + job.deadline_sec,
        "budget_usd": job.budget_usd,
        "state": JobState.QUEUED.value,
        "stage": Stage.INGEST.value,
        "created_at": now,
        "ready_at": now,
        "privacy": job.privacy.value,
        "sealed_spec": job.sealed_spec,
        "numeric_class": job.numeric_class,
        "model_fingerprint": job.model_fingerprint,
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
        "source": position_values(group.source),
        "rows": group.rows,
        "prompt_tokens": group.prompt_tokens,
        "prompts": artefact_values(group.prompts),
        "ready_at": now,
    }


def rejected_values(job_id: str, row: RejectedRow) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "row_index": row.row_index,
        "row_id": row.row_id,
        "code": row.code,
        "reason": row.reason,
    }


def decision_values(job_id: str, decision: Decision) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "at": decision.at,
        "action": decision.action.value,
        "proposer": decision.proposer,
        "reason": decision.reason,
        "acceptance": decision.acceptance,
        "break_even": decision.break_even,
        "sequences": decision.sequences,
    }


def position_values(position: SourcePosition) -> dict[str, Any]:
    return asdict(position)


def artefact_values(artefact: Artefact) -> dict[str, Any]:
    return asdict(artefact)


# --- from the store -------------------------------------------------------------------------


def job_row(row: Any) -> JobRow:
    return JobRow(
        job_id=row.job_id,
        name=row.name,
        tenant=row.tenant,
        spec=whole_spec(row.spec, row.sealed_spec),
        spec_digest=row.spec_digest,
        state=JobState(row.state),
        stage=Stage(row.stage),
        verifier=row.verifier,
        proposer=row.proposer,
        output_uri=row.output_uri,
        workspace_uri=row.workspace_uri,
        idempotency_key=row.idempotency_key,
        cancel_requested=row.cancel_requested,
        error=row.error,
        rows_total=row.rows_total,
        groups_total=row.groups_total + row.groups_cut,
        prompt_tokens=row.prompt_tokens,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        report=row.report,
        priority=row.priority,
        deadline_at=row.deadline_at,
        budget_usd=row.budget_usd,
        stop_reason=row.stop_reason,
        paused=row.ingest_resumes_at is not None,
        privacy=PrivacyMode(row.privacy),
        purged_at=row.purged_at,
        numeric_class=row.numeric_class,
        model_fingerprint=row.model_fingerprint,
        model_parts=row.model_parts or {},
        proposer_fingerprint=row.proposer_fingerprint,
        last_error=row.last_error,
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
        generation=row.generation,
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
    return RejectedRow(row.row_index, row.row_id, row.code, row.reason)


def decision(row: Any) -> Decision:
    return Decision(
        at=row.at,
        action=DecisionAction(row.action),
        proposer=row.proposer,
        reason=row.reason,
        acceptance=row.acceptance,
        break_even=row.break_even,
        sequences=row.sequences,
    )


def acceptance_count(row: Any) -> AcceptanceCount:
    return AcceptanceCount(row.proposer, row.tag or None, row.agreed, row.tested)


def past_output(row: Any) -> PastOutput:
    return PastOutput(row.job_id, row.row_id, row.sample_index, tuple(row.token_ids))


def artefact(values: Mapping[str, Any] | None) -> Artefact | None:
    return None if values is None else Artefact(**values)


def position(values: Mapping[str, Any] | None) -> SourcePosition | None:
    return None if values is None else SourcePosition(**values)
