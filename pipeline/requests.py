"""Between rows and the engine: rows become requests, completions become records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from specbatch.pipeline.engine.sequence import Completion, Request
from specbatch.pipeline.ingest.artefacts import DraftBlock
from specbatch.pipeline.policy.pricing import device_usd
from specbatch.pipeline.text_stop import Decode, TextStop, text_before_stop
from specbatch.schemas.records import CompletionRecord, JobRow, PromptRow
from specbatch.schemas.seeds import sample_seed
from specbatch.schemas.spec import JobSpec

Drafts = Mapping[tuple[int, int], DraftBlock]  # by (row_index, sample_index)


def requests_of(
    job_id: str,
    spec: JobSpec,
    row: PromptRow,
    decode: Decode,
    drafts: Drafts | None = None,
) -> list[Request]:
    """One request per sample of a row; `decode` is called only where there are stop strings."""
    params = spec.sampling.params(dict(row.overrides))
    depth = {"auto": None, "off": 0}.get(str(spec.speculation.depth), spec.speculation.depth)
    watch = partial(TextStop, decode, params.stop, params.min_tokens) if params.stop else None
    requests = []
    for sample in range(row.n):
        block = drafts.get((row.row_index, sample)) if drafts else None
        requests.append(
            Request(
                request_id=f"{job_id}/{row.row_index}/{sample}",
                prompt_ids=row.prompt_ids,
                params=params,
                seed=sample_seed(row.seed, sample),
                draft_ids=block.token_ids if block else (),
                depth=None if depth is None else int(depth),
                watch_text=watch,
            )
        )
    return requests


def ahead(request: Request, tokens: int) -> Request:
    """The request as the propose stage runs it: the same noise, `tokens` long, nothing drafted."""
    length = min(tokens, request.params.max_tokens)
    params = replace(
        request.params,
        max_tokens=length,
        min_tokens=min(length, request.params.min_tokens),
        stop=(),  # a draft that goes beyond the end is only a hint too many
        logprobs=False,
        top_logprobs=0,
    )
    return replace(request, params=params, depth=0, watch_text=None)


def row_and_sample(request_id: str) -> tuple[int, int]:
    _, row, sample = request_id.split("/")
    return int(row), int(sample)


def records_of(
    job: JobRow,
    rows: Sequence[PromptRow],
    completions: Sequence[Completion],
    drafts: Drafts,
    usd_per_hour: float,
) -> list[CompletionRecord]:
    """Completions with their rows' identity and their price; text is added when recorded."""
    by_index = {row.row_index: row for row in rows}
    records = []
    for done in completions:
        row_index, sample = row_and_sample(done.request_id)
        row, block = by_index[row_index], drafts.get((row_index, sample))
        draft_sec = block.compute_sec if block else 0.0
        records.append(
            CompletionRecord(
                row_index=row_index,
                sample_index=sample,
                row_id=row.row_id,
                tag=row.tag,
                seed=sample_seed(row.seed, sample),
                prompt_tokens=len(row.prompt_ids),
                token_ids=done.token_ids,
                text="",
                finish_reason=done.finish_reason,
                origins=done.origins,
                logprobs=done.logprobs,
                proposed=done.proposed,
                accepted=done.accepted,
                verifier_passes=done.verifier_passes,
                cost_usd=device_usd(done.compute_sec + draft_sec, usd_per_hour),
                verifier=job.verifier,
                proposer=job.proposer,
                error=done.error,
                proposed_at_depth=done.proposed_at_depth,
                accepted_at_depth=done.accepted_at_depth,
                compute_sec=done.compute_sec,
                draft_sec=draft_sec,
                decode_sec=done.decode_sec,
                baseline_sec=done.baseline_sec,
                top_logprobs=done.top_logprobs,
            )
        )
    return records


def with_text(
    records: Sequence[CompletionRecord],
    texts: Sequence[str],
    rows: Sequence[PromptRow],
    spec: JobSpec,
    decode: Decode,
) -> list[CompletionRecord]:
    """The records with their texts, which end before a stop string."""
    params = {row.row_index: spec.sampling.params(dict(row.overrides)) for row in rows}
    done = []
    for record, text in zip(records, texts, strict=True):
        of = params[record.row_index]
        shown = text_before_stop(decode, record.token_ids, text, of.stop, of.min_tokens)
        done.append(replace(record, text=shown))
    return done
