"""What verifying a group came to: its records, as far as it went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from specbatch.pipeline.audit.receipts import with_receipts
from specbatch.pipeline.engines.contract import Completion, Engines, Request, Ticket
from specbatch.pipeline.policy.breaker import Lessons
from specbatch.pipeline.privacy.retention import kept_records
from specbatch.pipeline.runtime.leases import Held
from specbatch.pipeline.stages.context import StageContext
from specbatch.pipeline.stages.draft_models import GroupModels
from specbatch.pipeline.stages.group_report import group_report, quarantine_report
from specbatch.pipeline.stages.judging import Judging
from specbatch.pipeline.stages.mending import (
    Answer,
    Mended,
    Mending,
    Outcome,
    is_own,
    mended,
    mending_report,
)
from specbatch.pipeline.stages.moderation import Moderation, policy_report, with_rulings
from specbatch.pipeline.stages.requests import Drafts, records_of, row_and_sample
from specbatch.pipeline.stages.reuse import NO_REUSE, Reuse, reuse_report
from specbatch.pipeline.stages.scoring import Scoring, score_report
from specbatch.pipeline.stages.texts import with_text
from specbatch.pipeline.stages.whole_results import put_kept
from specbatch.pipeline.storage.artefacts import ReuseNotes, Rulings
from specbatch.schemas.records import CompletionRecord, GroupWork, JobRow, PromptRow
from specbatch.schemas.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Group:
    """A claimed group, and what belongs to it."""

    held: Held
    work: GroupWork
    job: JobRow
    spec: JobSpec
    rows: Sequence[PromptRow]
    drafts: Drafts
    tickets: list[Ticket]  # its requests in the engine
    models: GroupModels
    reuse: Reuse = NO_REUSE
    requests: Mapping[str, Request] = field(default_factory=dict)  # by id, of all its samples


@dataclass(frozen=True, slots=True)
class Results:
    """Completions and their records, in one order."""

    completions: Sequence[Completion]
    records: Sequence[CompletionRecord]
    notes: ReuseNotes
    rulings: Rulings  # of the job's policies
    mending: Mapping[str, float]  # what it adds to the job's report
    lessons: Sequence[Lessons] = ()  # what the engine learned about drafts meanwhile


def results_of(
    context: StageContext, host: Engines, group: Group, computed: Iterable[Completion]
) -> Results:
    """Of what the engine has computed, after mending, and of copies of the same. Raises what
    `Moderation.judged`, `Scoring.scored` and waiting for a ticket raise."""
    further: list[Ticket] = []

    def answer(requests: Sequence[Request]) -> list[Completion]:
        ticket = host.service(group.spec.engine).submit(group.job.job_id, requests)
        further.append(ticket)
        group.tickets.append(ticket)
        if group.held.cancelled.is_set():  # before the engine knew of the requests
            host.cancel(group.job.job_id)
        return ticket.wait()

    whole = _mended(context, group, computed, answer)
    completions = group.reuse.with_copies(whole.completions)
    results = _judged(context, host, group, completions, whole.outcomes)
    return replace(results, lessons=[ticket.lessons for ticket in further])


def _mended(
    context: StageContext, group: Group, computed: Iterable[Completion], answer: Answer
) -> Mended:
    job = group.job
    mending = Mending(job, group.spec, group.rows, partial(context.tokenizers.of_job, job))
    return mended(mending, group.requests, computed, answer)


def _judged(
    context: StageContext,
    host: Engines,
    group: Group,
    completions: Sequence[Completion],
    outcomes: Mapping[str, Outcome],
) -> Results:
    job, price = group.job, context.price_microusd
    records = records_of(job, group.rows, completions, group.drafts, price)
    answered = {name: outcome.request for name, outcome in outcomes.items()}
    notes = group.reuse.answered_by(job, answered).notes(completions, records)
    of_group = (job, group.spec, group.rows, context.tokenizers, context.hooks, host)
    judging = Judging(*of_group, group.tickets, price)
    records, rulings = Moderation(judging).judged(records)
    records = Scoring(judging).scored(records, rulings)
    return Results(completions, records, notes, rulings, mending_report(outcomes, completions))


def recorded_as(
    context: StageContext,
    job: JobRow,
    spec: JobSpec,
    rows: Sequence[PromptRow],
    records: Sequence[CompletionRecord],
    rulings: Rulings,
) -> tuple[list[CompletionRecord], Sequence[CompletionRecord]]:
    """The records with their texts, as policies have left them, and of these what the store keeps.

    A receipt is of the whole text, so it comes first, and a policy is stricter than the tenant's
    privacy, so that comes last.
    """
    tokenizer = context.tokenizers.of_job(job)
    texts = tokenizer.decode_batch([record.token_ids for record in records])
    done = with_text(records, texts, rows, spec, tokenizer.decode)
    done = with_receipts(context.privacy.cipher, job.job_id, rows, done)
    done = with_rulings(done, texts, rows, rulings, job, spec)
    return done, kept_records(context.privacy.text_policy(job), done, tokenizer, texts)


# --- if the job is stopped meanwhile -------------------------------------------------------------
def keep_finished(context: StageContext, host: Engines, group: Group) -> None:
    """End the group; keep its finished rows, with their texts."""
    held, job, spec, tickets = group.held, group.job, group.spec, group.tickets
    lease = held.lease
    results = _finished(context, host, group)
    report = put_kept(context.objects, job, lease, results.records, results.rulings)
    job_as_pinned = context.jobs.of_group(job.job_id)[0]
    done, kept = recorded_as(
        context, job_as_pinned, spec, group.rows, results.records, results.rulings
    )
    report |= group_report(done) | reuse_report(results.notes, done) | policy_report(done)
    report |= {**results.mending, **quarantine_report(done, spec)}
    report |= score_report(done, group.rows, spec)
    timing = context.device_time(tickets)
    keep = partial(context.store.keep_part, lease, kept, timing, report, usage=held.usage)
    with held.usage.last_write():
        context.timing.commit(lease, keep)
    context.enqueue_publish(lease.job_id)


def _finished(context: StageContext, host: Engines, group: Group) -> Results:
    """Of whole rows."""
    done = {c.request_id: c for ticket in group.tickets for c in ticket.finished()}
    own = [c for name, c in done.items() if is_own(name)]  # no answer of a judge, no retry

    def answer(asked: Sequence[Request]) -> list[Completion]:
        return [done[request.request_id] for request in asked if request.request_id in done]

    whole = _mended(context, group, own, answer)
    known = replace(group.reuse, repeats={})  # the row that they repeat may not be whole
    completions = _whole_rows(known.with_copies(whole.completions), group.rows)
    return _judged(context, host, group, completions, whole.outcomes)


def _whole_rows(done: Sequence[Completion], rows: Sequence[PromptRow]) -> list[Completion]:
    """The completions of rows all of whose samples have finished.

    So a row is whole in this job's output, or whole in its remainder.
    """
    samples = Counter(row_and_sample(completion.request_id)[0] for completion in done)
    whole = {row.row_index for row in rows if samples[row.row_index] == row.n}
    return [c for c in done if row_and_sample(c.request_id)[0] in whole]
