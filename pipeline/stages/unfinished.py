"""The rows that were never finished, as records of errors between those that were."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.prompts import reader
from specbatch.schemas.records import (
    FIRST_SPLIT_INDEX,
    CompletionRecord,
    FinishReason,
    JobRow,
    PromptRow,
    Prompts,
    Stage,
)
from specbatch.schemas.seeds import sample_seed


def with_unfinished_rows(
    store: Store,
    objects: Objects,
    job: JobRow,
    done: Iterable[CompletionRecord] | None = None,
    with_logprobs: bool = False,
    first_row: int = 0,
) -> Iterator[CompletionRecord]:
    """All completions in input order, and one error record per sample of every unfinished row.

    `done`: the completions, if they do not come from the store. `with_logprobs`: also where nobody
    asked for them. `first_row`: rows before it are finished, and left out.
    """
    return heapq.merge(
        store.completions(job.job_id, details=with_logprobs, first_row=first_row)
        if done is None
        else done,
        (
            record
            for row, word, error in unfinished_rows(store, objects, job)
            for record in (
                cancelled(job, row, error)
                if word == Stage.CANCELLED
                else _records(job, row, FinishReason.ERROR, error or word)
            )
        ),
        key=lambda record: (record.row_index, record.sample_index),
    )


def unfinished_rows(
    store: Store, objects: Objects, job: JobRow
) -> Iterator[tuple[PromptRow, str, str]]:
    """(row, failed or cancelled, last error) of every row in a group that has no completions."""
    read = reader(objects, job, files=2)  # of a planned group, and of one that was split off
    kept = store.kept_rows(job.job_id)
    planned: list[tuple[Prompts, str, str]] = []
    split_off: list[tuple[Prompts, str, str]] = []
    for index, word, prompts, error in store.failed_groups(job.job_id):
        (planned if index < FIRST_SPLIT_INDEX else split_off).append((prompts, word, error))
    # Groups were planned in the order of their rows, and are split in any order.
    by_file = sorted(split_off, key=lambda group: (group[0].artefact.uri, group[0].row_start))
    firsts = {group[0]: read(group[0])[0].row_index for group in by_file}
    split_off.sort(key=lambda group: firsts[group[0]])

    def rows(groups: Iterable[tuple[Prompts, str, str]]) -> Iterator[tuple[PromptRow, str, str]]:
        for prompts, word, error in groups:
            for row in read(prompts):
                if row.row_index not in kept:
                    yield row, word, error

    return heapq.merge(rows(planned), rows(split_off), key=lambda found: found[0].row_index)


def cancelled(job: JobRow, row: PromptRow, error: str = "") -> Iterator[CompletionRecord]:
    """A record per sample of a row that a stop left undone."""
    reason = job.stop_reason or error or FinishReason.CANCELLED.value
    return _records(job, row, FinishReason.CANCELLED, reason)


def _records(
    job: JobRow, row: PromptRow, reason: FinishReason, error: str
) -> Iterator[CompletionRecord]:
    for sample in range(row.n):
        yield CompletionRecord(
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
