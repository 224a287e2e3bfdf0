"""Propose: the draft model writes ahead, one block per sample, with the request's own noise.

A block is a draft for the verifier and nothing else: no output depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from specbatch.pipeline.engines.contract import Completion, Engines, Ticket
from specbatch.pipeline.engines.models.fingerprint import fingerprint_of
from specbatch.pipeline.stages import spans
from specbatch.pipeline.stages.attempt import attempt_on_device, begin, claim_next
from specbatch.pipeline.stages.context import StageContext
from specbatch.pipeline.stages.requests import (
    block_request,
    blocks_of,
    goes_without_models,
    requests_of,
)
from specbatch.pipeline.storage.artefacts import write_drafts
from specbatch.pipeline.storage.prompts import rows_of
from specbatch.schemas.records import Artefact, JobRow, PromptRow, Stage
from specbatch.schemas.spec import JobSpec


def propose(context: StageContext, job_id: str, index: int) -> None:
    """Draft for the next group of this worker's draft model, and send it on to VERIFY."""
    host = context.engines("propose")
    work = claim_next(context, Stage.PROPOSE, host.model.ref, job_id, index)
    if work is None:
        context.pass_on(Stage.PROPOSE, job_id)
        return
    with attempt_on_device(context, work.lease, host) as (held, tickets):
        job, spec = context.jobs.of_group(work.lease.job_id)
        begin(context, held, job, work)
        rows = rows_of(context.objects, job, work.where)
        completions: list[Completion] = []
        artefact: Artefact | None = None
        model = host.serves().fingerprint  # as it was loaded, or is about to be
        writer = fingerprint_of(model.digest, spec.engine.proposer_weights) if model else ""
        if length := context.drafting.length(job, spec, writer):
            drafted = context.drafting.rows_ahead(job, spec, rows)
            tickets.append(_submit(context, host, job, spec, drafted, length))
            completions = tickets[0].wait()
            blocks = blocks_of(completions, context.price_microusd, writer)
            artefact = context.put(job, "drafts", work.lease, write_drafts(blocks))
        held.check()
        spans.drafted(held.span, job, tickets, completions)
        timing = context.device_time(tickets)
        tokens = sum(len(done.token_ids) for done in completions)
        context.drafting.drafted(job, tokens, timing.device_usd)
        advance = partial(
            context.store.advance, work.lease, Stage.VERIFY, artefact, timing, usage=held.usage
        )
        with held.usage.last_write():
            context.timing.commit(work.lease, advance)
        context.enqueue_unit(job, Stage.VERIFY, work.lease.group_index)


def _submit(
    context: StageContext,
    host: Engines,
    job: JobRow,
    spec: JobSpec,
    rows: Sequence[PromptRow],
    length: int,
) -> Ticket:
    decode, form = context.decode(job), context.grammar_of(job, host.model.vocab_size)
    cap = context.tenant_depths.get(job.tenant)
    text_policy = context.privacy.text_policy(job)
    requests = [
        block_request(request, length)
        for row in rows
        if not goes_without_models(spec, row)
        for request in requests_of(
            *(job.job_id, spec, row, decode), tenant_cap=cap, kept=text_policy, grammar_of=form
        )
        if request.max_depth != 0  # nobody would verify it
    ]
    return host.service(spec.engine.of_proposer()).submit(job.job_id, requests)
