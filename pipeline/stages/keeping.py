"""What is kept of a group whose job was stopped while it was verified, and what is left of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from specbatch.pipeline.engines.contract import Completion, Submitted
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.stages.requests import Drafts, records_of, row_and_sample, with_text
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.prompts import rows_of
from specbatch.schemas.records import CompletionRecord, GroupWork, JobRow, PromptRow
from specbatch.schemas.spec import JobSpec


def finished_rows(tickets: Iterable[Submitted], rows: Sequence[PromptRow]) -> list[Completion]:
    """The completions of rows all of whose samples have ended of themselves.

    A row is whole in this job's output, or whole in what is left to do.
    """
    done = [completion for ticket in tickets for completion in ticket.finished()]
    samples = Counter(row_and_sample(completion.request_id)[0] for completion in done)
    whole = {row.row_index for row in rows if samples[row.row_index] == row.n}
    return [c for c in done if row_and_sample(c.request_id)[0] in whole]


def finished_records(
    job: JobRow,
    spec: JobSpec,
    rows: Sequence[PromptRow],
    drafts: Drafts,
    tickets: Iterable[Submitted],
    codec: TextTokenizer,
    price_microusd: int,
) -> list[CompletionRecord]:
    """The same as the store keeps them, with their texts."""
    records = records_of(job, rows, finished_rows(tickets, rows), drafts, price_microusd)
    texts = codec.decode_batch([record.token_ids for record in records])
    return with_text(records, texts, rows, spec, codec.decode)


def rows_left(store: Store, objects: Objects, job: JobRow, work: GroupWork) -> Sequence[PromptRow]:
    """A group's rows, but for those that were finished when its job was stopped."""
    rows = rows_of(objects, job, work.where)
    if not work.rows_kept:
        return rows
    kept = store.kept_rows(work.lease.job_id, work.lease.group_index)
    return [row for row in rows if row.row_index not in kept]
