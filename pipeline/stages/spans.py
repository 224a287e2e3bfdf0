"""What the stages note in spans: counts, times and ids, never a text.

Nothing is built if tracing is off. Errors in here are logged, and the work continues.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec

from specbatch.pipeline.engines.contract import Completion, Ticket
from specbatch.pipeline.inputs.planner import PlannedGroup
from specbatch.pipeline.observe.tracing import span_names as names
from specbatch.pipeline.observe.tracing.tracing import Attributes, Span, Value
from specbatch.schemas.records import (
    CompletionRecord,
    GroupWork,
    JobRow,
    PromptRow,
    Stage,
    request_id_of,
)
from specbatch.schemas.routing import queue_for

log = logging.getLogger(__name__)

_OPERATION = {names.GEN_AI_OPERATION: "text_completion", names.GEN_AI_PROVIDER: "specbatch"}
P = ParamSpec("P")


def _harmless(
    note: Callable[Concatenate[Span, P], None],
) -> Callable[Concatenate[Span, P], None]:
    @wraps(note)
    def noted(span: Span, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if not span.is_on:
            return
        try:
            note(span, *args, **kwargs)
        except Exception:
            log.exception("could not write this to the trace")

    return noted


@_harmless
def begun(span: Span, stage: Stage, job: JobRow, work: GroupWork | None = None) -> None:
    """Which job it is, and how long the group waited to be claimed."""
    model = job.proposer if stage is Stage.PROPOSE else job.verifier
    noted: dict[str, Value] = {names.PRIVACY: str(job.privacy)}
    noted[names.MESSAGING_QUEUE] = queue_for(stage, model, job.priority)
    if job.privacy.is_full:
        noted |= {names.JOB_NAME: job.name, names.TENANT: job.tenant}
    if work is not None:
        noted |= {names.QUEUE_SEC: work.waited_sec, names.ROWS: work.rows}
    span.note(noted)


@_harmless
def read(span: Span, job: JobRow, batch: Sequence[PlannedGroup], begun_ns: int) -> None:
    """Groups that were written and stored since `begun_ns`."""
    now = time.time_ns()
    for planned in batch:
        for row in planned.rows if span.has_group(planned.index) else ():
            for request_id in _asked(span, job, row):
                noted: dict[str, Value] = {
                    names.GROUP: planned.index,
                    names.GEN_AI_INPUT: len(row.prompt_ids),
                }
                span.request(request_id, noted, begun_ns, now, failed=False)


@_harmless
def drafted(
    span: Span, job: JobRow, tickets: Sequence[Ticket], completions: Sequence[Completion]
) -> None:
    """What a draft model wrote ahead."""
    model: Attributes = {**_OPERATION, names.GEN_AI_MODEL: job.proposer or ""}
    tokens = sum(len(done.token_ids) for done in completions)
    span.note({**model, names.DRAFTED: tokens, names.COMPUTE_SEC: _compute(completions)})
    times = _times(tickets)
    for done in completions:
        if span.is_asked(done.request_id):
            noted = {**model, names.DRAFTED: len(done.token_ids)}
            noted[names.COMPUTE_SEC] = done.compute_sec
            span.request(done.request_id, noted, *times(done.request_id), bool(done.error))


@_harmless
def verified(
    span: Span, job: JobRow, tickets: Sequence[Ticket], records: Sequence[CompletionRecord]
) -> None:
    """What the verifier made of a group."""
    model: Attributes = {
        **_OPERATION,
        names.GEN_AI_MODEL: job.verifier,
        names.GEN_AI_ANSWERED_BY: job.verifier,
    }
    span.note(
        {
            **model,
            names.GEN_AI_INPUT: sum(r.prompt_tokens for r in records),
            names.GEN_AI_OUTPUT: sum(len(r.token_ids) for r in records),
            names.PROPOSED: sum(r.proposed for r in records),
            names.ACCEPTED: sum(r.accepted for r in records),
            names.PASSES: sum(r.verifier_passes for r in records),
            names.COMPUTE_SEC: sum(r.compute_sec for r in records),
            names.COST_USD: sum(r.cost_usd for r in records),
            names.FAILED: sum(r.error is not None for r in records),
        }
    )
    times = _times(tickets)
    for record in records:
        request_id = request_id_of(job.job_id, record.row_index, record.sample_index)
        if span.is_asked(request_id):
            noted = {**model, **_of(record), names.GEN_AI_RESPONSE_ID: request_id}
            noted |= {names.PROPOSED: record.proposed}
            noted |= {names.ACCEPTED: record.accepted, names.PASSES: record.verifier_passes}
            noted |= {names.COMPUTE_SEC: record.compute_sec, names.COST_USD: record.cost_usd}
            span.request(request_id, noted, *times(request_id), bool(record.error))


@_harmless
def recorded(span: Span, job: JobRow, records: Sequence[CompletionRecord], begun_ns: int) -> None:
    """Completions that are in the store now."""
    now = time.time_ns()
    for record in records:
        request_id = request_id_of(job.job_id, record.row_index, record.sample_index)
        if span.is_asked(request_id):
            noted = {**_of(record), names.GEN_AI_RESPONSE_ID: request_id}
            span.request(request_id, noted, begun_ns, now, bool(record.error))


@_harmless
def split(span: Span, index: int, kept: int) -> None:
    """All but the first rows went to a group of their own."""
    span.event(names.SPLIT, {names.SPLIT_INDEX: index, names.ROWS: kept})


def _of(record: CompletionRecord) -> dict[str, Value]:
    return {
        names.GEN_AI_INPUT: record.prompt_tokens,
        names.GEN_AI_OUTPUT: len(record.token_ids),
        names.GEN_AI_FINISH: [str(record.finish_reason)],
    }


def _asked(span: Span, job: JobRow, row: PromptRow) -> Iterable[str]:
    ids = (request_id_of(job.job_id, row.row_index, sample) for sample in range(row.n))
    return (request_id for request_id in ids if span.is_asked(request_id))


def _compute(completions: Sequence[Completion]) -> float:
    return sum(done.compute_sec for done in completions)


def _times(tickets: Sequence[Ticket]) -> Callable[[str], tuple[int, int]]:
    """When a request was handed to the engine and when it ended, in nanoseconds."""
    ended: Mapping[str, int] = {k: v for ticket in tickets for k, v in ticket.ended_ns.items()}
    begun_ns = min((ticket.begun_ns for ticket in tickets), default=time.time_ns())
    return lambda request_id: (begun_ns, ended.get(request_id, begun_ns))
