"""Verify: the engine decides every token of a group. Drafts make that faster and change nothing.

    claim     the next group in fair-share order that this worker may verify
    rows      its prompts, without those that were finished before its job was stopped
    drafts    blocks that were written ahead for them
    reuse     answers that the store has, if the job wants them
    engine    join the fused batch and wait; last rows may go to an idle worker meanwhile
    results   malformed outputs are mended; one record per sample, judged by the job's policies and
              scored, goes to its workspace
    commit    the group moves to RECORD, with the device time that it took

If the job is stopped meanwhile, its finished rows are kept and the group ends.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from specbatch.pipeline.engines.contract import Engines, Request
from specbatch.pipeline.policy.breaker import Lessons
from specbatch.pipeline.policy.costs.controls import NOTHING_MEASURED
from specbatch.pipeline.runtime.work_stealing import wait_for_rows
from specbatch.pipeline.stages import spans
from specbatch.pipeline.stages.attempt import attempt_on_device, begin, claim_next
from specbatch.pipeline.stages.context import StageContext
from specbatch.pipeline.stages.drafting import uses_history
from specbatch.pipeline.stages.moderation import prepare
from specbatch.pipeline.stages.refill import refilled
from specbatch.pipeline.stages.requests import requests_of
from specbatch.pipeline.stages.results import Group, Results, keep_finished, results_of
from specbatch.pipeline.stages.reuse import known_answers
from specbatch.pipeline.stages.scoring import prepare_scoring
from specbatch.pipeline.storage.artefacts import DraftBlock, read_drafts, write_results
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.prompts import rows_of
from specbatch.pipeline.storage.workspace import read_own
from specbatch.schemas.errors import (
    ModelChangedError,
    ObjectError,
    RequestCancelledError,
    UsageError,
)
from specbatch.schemas.numeric_class import UNKNOWN, Pinned
from specbatch.schemas.records import GroupWork, JobRow, PromptRow, Stage, Verification
from specbatch.schemas.spec import JobSpec

log = logging.getLogger(__name__)

ATTEMPTS_WITH_DRAFTS = 3  # of a group; at the last one missing drafts are no error


def verify(context: StageContext, job_id: str, index: int) -> None:
    """Verify the next group of this worker's model, and send it on to RECORD."""
    host = context.engines("verify")
    serves = host.serves()
    work = claim_next(context, Stage.VERIFY, host.model.ref, job_id, index, serves)
    if work is None:
        context.pass_on(Stage.VERIFY, job_id, serves)
        return
    with attempt_on_device(context, work.lease, host) as (held, tickets):
        job, spec = _job_of(context, host, work)
        begin(context, held, job, work)
        _check_drafts_here(host.draft_model is not None, spec)
        rows = _rows_left(context, job, work)
        drafts = blocks_ahead(context.objects, job, work, context.max_attempts)
        loaded = (serves.drafts, host.draft_model)
        models = context.draft_models.of_group(job, spec, work.lease.group_index or 0, *loaded)
        prepare(spec, context.hooks, host)
        prepare_scoring(job, spec, context.hooks, host)
        group = Group(held, work, job, spec, rows, drafts, tickets, models)
        by_row = _requests(context, host, group)
        by_id = {request.request_id: request for request in chain.from_iterable(by_row)}
        known = known_answers(context.store, job, spec, by_row)
        group = replace(group, reuse=known, requests=by_id)
        try:
            lessons = _run_engine(context, host, group, group.reuse.left(by_row))
            group = _with_fingerprint(host, group)
            results = results_of(context, host, group, chain(*(t.wait() for t in tickets)))
        except RequestCancelledError:
            if not held.cancelled.is_set():
                raise  # the worker ends, the job does not
            keep_finished(context, host, _with_fingerprint(host, group))
            return
        _commit(context, group, [*lessons, *results.lessons], results)
    if work.suspect:
        _enqueue_suspects(context, work.lease.job_id)


def _job_of(context: StageContext, host: Engines, work: GroupWork) -> tuple[JobRow, JobSpec]:
    """The job, and its spec, in the numeric class in which this worker verifies it."""
    job, spec = context.jobs.of_group(work.lease.job_id)
    job = replace(job, model_fingerprint=work.model_fingerprint)
    engine, key = spec.engine.resolved(work.numeric_class), spec.key_in(work.numeric_class)
    here, pinned = host.serves().class_of(key), work.numeric_class
    if pinned not in (None, UNKNOWN, here):
        raise UsageError(f"the job asks for {key}, which is {here} here and not {pinned}")
    return replace(job, numeric_class=here), spec.model_copy(update={"engine": engine})


def _rows_left(context: StageContext, job: JobRow, work: GroupWork) -> Sequence[PromptRow]:
    """The group's rows without those that were finished when its job was stopped."""
    rows = rows_of(context.objects, job, work.where)
    if not work.rows_kept:
        return rows
    kept = context.store.kept_rows(work.lease.job_id, work.lease.group_index)
    return [row for row in rows if row.row_index not in kept]


def _check_drafts_here(has_draft_model: bool, spec: JobSpec) -> None:
    """A ratio test without drafts would sample as the spec says, and never as it is meant.

    Raises `UsageError`.
    """
    verification = spec.speculation.verification
    if verification is not Verification.COUPLED and not has_draft_model:
        raise UsageError(
            f"verification {verification} needs the draft model beside the verifier: start "
            f"`specbatch worker verify --verifier {spec.verifier} --proposer {spec.proposer}`"
        )


def blocks_ahead(
    objects: Objects, job: JobRow, work: GroupWork, max_attempts: int
) -> dict[tuple[int, int], DraftBlock]:
    """The blocks that were written ahead for the group, by row and sample.

    Raises `ObjectError` in a group's first attempts; later ones go without lost blocks.
    """
    if work.drafts is None:
        return {}
    try:
        blocks = read_drafts(read_own(objects, job, work.drafts))
    except ObjectError as error:
        if work.lease.attempt < min(ATTEMPTS_WITH_DRAFTS, max_attempts):
            raise  # it may be the storage, and over by the next attempt
        message = "job %s group %s continues without its drafts: %s"
        log.warning(message, job.job_id, work.lease.group_index, error)
        return {}
    return {(block.row_index, block.sample_index): block for block in blocks}


def _run_engine(
    context: StageContext, host: Engines, group: Group, by_row: Sequence[Sequence[Request]]
) -> list[Lessons]:
    """Complete the group's rows in its tickets; returns what the engine learned about drafts.

    Rows that went to an idle worker are not among the completions, nor in the group any more.
    """
    held, job, spec, tickets = group.held, group.job, group.spec, group.tickets
    if not by_row:
        return []
    requests = list(chain.from_iterable(by_row))
    blocks = group.drafts.values()
    priors = context.drafting.priors(job, blocks) if spec.speculation.enabled else ()

    def split(keep: int) -> None:
        index = context.store.split_group(held.lease, keep)
        spans.split(held.span, index, keep)
        context.enqueue_unit(job, Stage.VERIFY, index)

    with refilled(context.refills, job, spec, held.lease.group_index or 0, requests):
        service = host.service(spec.engine)
        tickets.append(service.submit(job.job_id, requests, priors))
        held.spent_usd = lambda: context.device_time(tickets).device_usd
        if held.cancelled.is_set():  # before the engine knew of the requests
            host.cancel(job.job_id)
        # Else its rows are not counted as the store does.
        may_split = not group.work.rows_kept and not group.reuse.is_any
        return wait_for_rows(service, tickets, held, by_row, split, may_split)


def _requests(context: StageContext, host: Engines, group: Group) -> list[list[Request]]:
    """By row, a request for each sample."""
    job, spec = group.job, group.spec
    decode = context.decode(job)
    history = context.drafting.history(job) if uses_history(spec) else None
    tag_models = host.tag_models(spec.speculation, group.models.drafting)
    candidates = host.tag_models(spec.speculation, group.models.in_shadow)
    cap, policy = context.tenant_depths.get(job.tenant), context.privacy.text_policy(job)
    grammar_of = context.grammar_of(job, host.model.vocab_size)
    of_group = (group.drafts, history, cap, tag_models, candidates, policy, grammar_of)
    return [requests_of(job.job_id, spec, row, decode, *of_group) for row in group.rows]


def _with_fingerprint(host: Engines, group: Group) -> Group:
    """The group with the fingerprint of the model that has decided its tokens.

    The model may have been loaded after the group was claimed. Raises `ModelChangedError` if its
    files were replaced between the two.
    """
    serves, job = host.serves(), group.job
    if not serves.takes(Pinned.of(group.work)):
        raise ModelChangedError(
            f"model `{host.model.ref}` was replaced while it was loaded for job {job.job_id}"
        )
    found = serves.fingerprint
    return replace(
        group, job=replace(job, model_fingerprint=None if found is None else found.digest)
    )


def _commit(
    context: StageContext, group: Group, lessons: Sequence[Lessons], results: Results
) -> None:
    """Write the results, and send the group on to RECORD."""
    held, job, tickets, records = group.held, group.job, group.tickets, results.records
    measured = sum((lesson.measured for lesson in lessons), NOTHING_MEASURED)
    figures = {**measured.priced(context.price_microusd).report(), **results.mending}
    data = write_results(records, figures, results.notes, results.rulings)
    artefact = context.put(job, "results", held.lease, data)
    held.check()
    spans.verified(held.span, job, tickets, records)
    for lesson in lessons:  # before the commit, so that a finished job has taught everything
        context.drafting.learn(job, lesson)
    timing = context.device_time(tickets)
    advance = partial(
        context.store.advance, held.lease, Stage.RECORD, artefact, timing, usage=held.usage
    )
    with held.usage.last_write():
        context.timing.commit(held.lease, advance)
    context.enqueue_unit(job, Stage.RECORD, held.lease.group_index)
    pairs = zip(records, results.completions, strict=True)
    done = [(record, c.shadow_pair) for record, c in pairs if not c.reused_from]
    context.draft_models.observe(held.lease, group.models.trials, done)


def _enqueue_suspects(context: StageContext, job_id: str) -> None:
    """The job's groups that are due at VERIFY: this worker may have been refused them."""
    for work in context.store.due(job_id=job_id):
        if work.stage is Stage.VERIFY:
            context.enqueue(work)
