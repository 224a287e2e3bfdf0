"""Between rows and the engine: rows become requests, and completions become records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from specbatch.pipeline.engines.contract import Cohort, Completion, Grammar, Request
from specbatch.pipeline.engines.models.draft_names import DRAFT_MODEL
from specbatch.pipeline.engines.proposers.history import History
from specbatch.pipeline.policy.costs.pricing import cost_units
from specbatch.pipeline.policy.depth import depth_cap
from specbatch.pipeline.privacy.retention import KEEP_ALL, TextPolicy
from specbatch.pipeline.stages.text_stop import Decode, TextStop
from specbatch.pipeline.storage.artefacts import DraftBlock
from specbatch.schemas.draft_switches import RowScope
from specbatch.schemas.provenance import TICKS_PER_SEC
from specbatch.schemas.records import (
    CompletionRecord,
    JobRow,
    PromptRow,
    Verification,
    request_id_of,
)
from specbatch.schemas.registry import NO_MODELS
from specbatch.schemas.seeds import retry_seed, sample_seed
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.speculation_spec import NO_DRAFT_MODEL
from specbatch.schemas.timekeeping import usd_of

GrammarOf = Callable[[str], Grammar]  # of a canonical `response_format`
Drafts = Mapping[tuple[int, int], DraftBlock]  # by (row_index, sample_index)


def requests_of(
    job_id: str,
    spec: JobSpec,
    row: PromptRow,
    decode: Decode,
    drafts: Drafts | None = None,
    history: History | None = None,
    tenant_cap: int | None = None,
    tag_models: Mapping[str | None, str] = NO_MODELS,
    candidates: Mapping[str | None, str] = NO_MODELS,
    kept: TextPolicy = KEEP_ALL,
    grammar_of: GrammarOf | None = None,
) -> list[Request]:
    """One request per sample of a row; `decode` is called only where there are stop strings.

    `grammar_of` compiles what rows ask of the form; None: drafts are asked for, of any form.
    `tag_models`: the only draft models by tag, under None of all other rows; `candidates` draft in
    shadow. The engine knows a row by the tag, its history by the id that is `kept`.
    """
    params = spec.sampling.params(dict(row.overrides))
    cap = cap_of(spec, row, tenant_cap)
    sources = spec.speculation.sources
    pinned = None if spec.speculation.verification is Verification.COUPLED else DRAFT_MODEL
    watch = partial(TextStop, decode, params.stop, params.min_tokens) if params.stop else None
    grammar = grammar_of(params.form) if params.form and grammar_of is not None else None
    requests = []
    for sample in range(row.n):
        block = drafts.get((row.row_index, sample)) if drafts else None
        requests.append(
            Request(
                request_id=request_id_of(job_id, row.row_index, sample),
                prompt_ids=row.prompt_ids,
                params=params,
                seed=sample_seed(row.seed, sample),
                draft_ids=block.token_ids if block else (),
                depth=_depth_of(spec, cap),
                verification=spec.speculation.verification,
                watch_text=watch,
                route=Cohort(job_id, kept.tag(row.tag)),
                scope=scope_of(spec, row.tag),
                max_depth=cap,
                context_depths=spec.speculation.prompt_depths,
                sources=None if sources == "hybrid" else frozenset(sources),
                draft_model=tag_models.get(row.tag, tag_models.get(None, pinned)),
                candidate=candidates.get(row.tag, candidates.get(None)),
                shadow=spec.speculation.depth == "shadow" and cap != 0,
                past_ids=history.past(kept.row_id(row.row_id), sample) if history else (),
                history=history.index if history else None,
                grammar=grammar,
            )
        )
    return requests


def scope_of(spec: JobSpec, tag: str | None = None) -> RowScope:
    """Of a job's rows with this tag; None: of all its rows."""
    return RowScope(spec.tenant, spec.name, tag or "")


def goes_without_models(spec: JobSpec, row: PromptRow) -> bool:
    """Whether the job keeps draft models away from the row, so that none writes ahead for it."""
    return (row.tag, NO_DRAFT_MODEL) in spec.speculation.routes


def cap_of(spec: JobSpec, row: PromptRow, tenant: int | None) -> int | None:
    """How deep drafts may reach for a row; None: as deep as pays."""
    speculation = spec.speculation
    return depth_cap(
        tenant=tenant,
        job=speculation.max_depth,
        tags=dict(speculation.tag_depths),
        tag=row.tag,
        by_prompt_tokens=speculation.prompt_depths,
        prompt_tokens=len(row.prompt_ids),
    )


def _depth_of(spec: JobSpec, cap: int | None) -> int | None:
    """Draft tokens per step; None: as many as pay."""
    depth = spec.speculation.depth
    if depth == "auto":
        return 0 if cap == 0 else None
    if isinstance(depth, str):
        return 0
    return depth if cap is None else min(depth, cap)


def block_request(request: Request, tokens: int) -> Request:
    """The request as the propose stage runs it: the same noise, `tokens` long, nothing drafted."""
    length = min(tokens, request.params.max_tokens)
    params = replace(
        request.params,
        max_tokens=length,
        min_tokens=min(length, request.params.min_tokens),
        stop=(),  # a draft that goes beyond the end does no harm
        logprobs=False,
        top_logprobs=0,
    )
    return replace(
        *(request,), params=params, depth=0, watch_text=None, shadow=False, candidate=None,
        past_ids=(), history=None,
    )  # fmt: skip


def continuation(request: Request, output_ids: tuple[int, ...], tokens: int) -> Request:
    """A request that continues decided output by up to `tokens` more, under another id."""
    return replace(
        block_request(request, len(output_ids) + tokens),
        request_id=f"{request.request_id}/further",
        decided_ids=output_ids,
    )


def row_and_sample(request_id: str) -> tuple[int, int]:
    _, row, sample = request_id.split("/")
    return int(row), int(sample)


def records_of(
    job: JobRow,
    rows: Sequence[PromptRow],
    completions: Sequence[Completion],
    drafts: Drafts,
    price_microusd: int,
) -> list[CompletionRecord]:
    """Completions with their rows' identity and their price; text is added when recorded.

    `price_microusd`: of an hour of this device.
    """
    by_index = {row.row_index: row for row in rows}
    records = []
    for done in completions:
        row_index, sample = row_and_sample(done.request_id)
        row, block = by_index[row_index], drafts.get((row_index, sample))
        ahead_ticks, ahead_price = (block.ticks, block.price_microusd) if block else (0, 0)
        units = cost_units(done.ticks.total, price_microusd) + cost_units(ahead_ticks, ahead_price)
        records.append(
            CompletionRecord(
                row_index=row_index,
                sample_index=sample,
                row_id=row.row_id,
                tag=row.tag,
                seed=retry_seed(sample_seed(row.seed, sample), done.retry),
                prompt_tokens=len(row.prompt_ids),
                token_ids=done.token_ids,
                text="",
                finish_reason=done.finish_reason,
                origins=done.origins,
                logprobs=done.logprobs,
                proposed=done.proposed,
                accepted=done.accepted,
                verifier_passes=done.verifier_passes,
                cost_usd=usd_of(units),
                verifier=job.verifier,
                proposer=job.proposer,
                error=done.error,
                proposed_at_depth=done.proposed_at_depth,
                accepted_at_depth=done.accepted_at_depth,
                compute_sec=done.compute_sec,
                draft_sec=ahead_ticks / TICKS_PER_SEC,
                decode_sec=done.decode_sec,
                baseline_sec=done.baseline_sec,
                top_logprobs=done.top_logprobs,
                recheck=done.recheck,
                shadow_proposed=done.shadow_proposed,
                shadow_accepted=done.shadow_accepted,
                provenance=done.provenance,
                ticks=done.ticks,
                price_microusd=price_microusd,
                ahead_ticks=ahead_ticks,
                ahead_price_microusd=ahead_price,
                numeric_class=job.numeric_class,
                model_fingerprint=job.model_fingerprint,
                reused_from=done.reused_from,
            )
        )
    return records


def blocks_of(
    completions: Sequence[Completion], price_microusd: int, proposer: str = ""
) -> list[DraftBlock]:
    """What was written ahead, of those that did not fail. `proposer`: its model's fingerprint."""
    return [
        DraftBlock(
            *row_and_sample(c.request_id), c.token_ids, c.ticks.total, price_microusd, proposer
        )
        for c in completions
        if c.error is None
    ]
