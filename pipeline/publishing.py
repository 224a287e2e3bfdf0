"""What a finished job says: which rows are in its output, and which word ends it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter

from specbatch.pipeline.ingest.artefacts import read_prompts
from specbatch.pipeline.ingest.objects import Objects
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.records import (
    Artefact,
    CompletionRecord,
    FinishReason,
    JobProgress,
    JobRow,
    JobState,
    PromptRow,
)
from specbatch.schemas.seeds import sample_seed


def with_unfinished_rows(store: Store, objects: Objects, job: JobRow) -> Iterator[CompletionRecord]:
    """All completions in input order, and one error record per sample of every unfinished group.

    Rows in, rows out: a failed or cancelled group is in the output with its reason.
    """
    unfinished = chain.from_iterable(
        _unfinished(objects, job, artefact, word, error)
        for _, word, artefact, error in sorted(store.failed_groups(job.job_id), key=itemgetter(0))
    )
    return heapq.merge(
        store.completions(job.job_id),
        unfinished,
        key=lambda record: (record.row_index, record.sample_index),
    )


def final_state(job: JobRow, progress: JobProgress) -> tuple[JobState, str | None]:
    """DONE, PARTIAL (some rows failed), FAILED (all did), or CANCELLED."""
    finished = progress.completions
    missing = progress.rows_failed + (progress.groups_total - progress.groups_done)
    if job.cancel_requested and (progress.groups_done < progress.groups_total or not finished):
        return JobState.CANCELLED, None
    if not missing:
        return JobState.DONE, None
    if finished:
        return JobState.PARTIAL, None
    return JobState.FAILED, "no row could be completed; see the error column of the output"


def _unfinished(
    objects: Objects, job: JobRow, artefact: Artefact, word: str, error: str
) -> Iterator[CompletionRecord]:
    reason = FinishReason.CANCELLED if word == "cancelled" else FinishReason.ERROR
    for row in read_prompts(objects.get_bytes(artefact.uri, artefact)):
        for sample in range(row.n):
            yield _empty(job, row, sample, reason, error or word)


def _empty(
    job: JobRow, row: PromptRow, sample: int, reason: FinishReason, error: str
) -> CompletionRecord:
    return CompletionRecord(
        row_index=row.row_index,
        sample_index=sample,
        row_id=row.row_id,
        tag=row.tag,
        seed=sample_seed(row.seed, sample),
        prompt_tokens=len(row.prompt_ids),
        token_ids=(),
        text="",
        finish_reason=reason,
        origins=(),
        logprobs=(),
        proposed=0,
        accepted=0,
        verifier_passes=0,
        cost_usd=0.0,
        verifier=job.verifier,
        proposer=job.proposer,
        error=error,
    )
