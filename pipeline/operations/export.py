"""Exports what the store keeps of a job as Parquet, in batches.

Memory does not grow with the job: it holds a page of completions, a prompts file and a row group.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import pyarrow as pa

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.outputs.corrections import Corrections
from specbatch.pipeline.outputs.export_columns import (
    completion_batch,
    cost_batch,
    time_batch,
    token_batch,
)
from specbatch.pipeline.outputs.exports import ExportWriter
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.prompts import PromptFinder, in_order
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.errors import UsageError
from specbatch.schemas.export_arrow import SCHEMAS
from specbatch.schemas.exports import Exported, ExportKind, ExportOrder
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.masking import masked
from specbatch.schemas.records import CompletionRecord, JobRow

log = logging.getLogger(__name__)

# A batch ends with the completion that reaches one of these limits.
BATCH_ROWS = 1000
BATCH_TOKENS = 1 << 17

_BATCH_OF = {
    ExportKind.COMPLETIONS: completion_batch,
    ExportKind.TOKENS: token_batch,
    ExportKind.COSTS: cost_batch,
}

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Exporter:
    """Exports sets of one store's jobs.

    `first_look` checks whether the place can be written. It has less patience than `objects`.
    """

    store: Store
    objects: Objects
    first_look: Objects

    def export(
        self, job_id: str, order: ExportOrder, on_progress: OnProgress = lambda *_: None
    ) -> Exported:
        """Write the set; `on_progress` gets how many completions were read, and of how many.

        Raises `JobNotFoundError`, `UsageError` for a job that has not ended, `OutputError` for a
        place that is taken or cannot be written, `ObjectError` and `StoreError`.
        """
        job = self.store.get_job(job_id)
        if not (job.state.is_final or order.so_far):
            raise UsageError(
                f"job {job.job_id} is still {job.state}: wait for it (`specbatch show` says if "
                "it must be resumed), or export what is finished so far with --so-far"
            )
        writer = ExportWriter(self.objects, order.to, order.kind, order.overwrite)
        writer.check(self.first_look)
        if order.kind is not ExportKind.TIME:
            next(self.store.completions(job.job_id, batch=1), None)  # raises without the right
        # First: the log has every export before its first file.
        said = {"what": order.kind.value, "to": masked(order.to)}
        self.store.note_action(job.job_id, EntryKind.EXPORTED, said)
        corrections = Corrections(job.job_id, order.selection)
        batches = self._batches(job, order.kind, corrections, on_progress)
        files = writer.write(SCHEMAS[order.kind], batches, _about(job, order))
        return Exported(
            job_id=job.job_id,
            kind=order.kind,
            to=order.to,
            files=files,
            left_out={reason: n for reason, n in corrections.left_out.items() if n},
            remarks=tuple(_remarks(job, corrections)),
        )

    def _batches(
        self,
        job: JobRow,
        kind: ExportKind,
        corrections: Corrections,
        on_progress: OnProgress,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the set one batch at a time."""
        if kind is ExportKind.TIME:
            slices = self.store.time_slices(job.job_id)
            while some_time := list(islice(slices, BATCH_ROWS)):
                yield time_batch(job.job_id, some_time)
            return
        if kind is ExportKind.CORRECTIONS:
            where = partial(self.store.prompts_of, job.job_id)
            # The files have complete prompts while a job runs, even if the store keeps less.
            rows = in_order(self.objects, job, where) if job.privacy.is_full else iter(())
            prompts = PromptFinder(rows)

            def make(some: list[CompletionRecord]) -> pa.RecordBatch:
                return corrections.batch(some, [prompts.of(r.row_index) for r in some])
        else:
            make = partial(_BATCH_OF[kind], job.job_id)
        read, known = 0, self.store.progress(job.job_id)
        page = _page_rows(known)
        for some in in_batches(self.store.completions(job.job_id, batch=page)):
            yield make(some)
            read += len(some)
            on_progress(read, known.completions)


def in_batches(
    records: Iterator[CompletionRecord], rows: int = BATCH_ROWS, tokens: int = BATCH_TOKENS
) -> Iterator[list[CompletionRecord]]:
    """Batches of at most `rows` records or about `tokens` tokens."""
    batch: list[CompletionRecord] = []
    held = 0
    for record in records:
        batch.append(record)
        held += len(record.token_ids)
        if len(batch) >= rows or held >= tokens:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _page_rows(known: JobProgress) -> int:
    """How many completions to read at once: fewer if they are long."""
    usual = known.completion_tokens // max(1, known.completions)
    return max(1, min(BATCH_ROWS, 2 * BATCH_TOKENS // max(1, usual)))


def _about(job: JobRow, order: ExportOrder) -> dict[str, str]:
    """The origin that every file names, without a date: equal jobs give equal bytes."""
    about = {
        "specbatch_export": order.kind.value,
        "specbatch_job": job.job_id,
        "specbatch_job_name": job.name,
        "specbatch_tenant": job.tenant,
        "specbatch_spec_sha256": job.spec_digest,
        "specbatch_job_state": job.state.value,
    }
    chosen = order.selection
    if order.kind is ExportKind.CORRECTIONS:
        about["specbatch_min_rejections"] = str(chosen.fewest)
        about |= {f"specbatch_{n}": v for n in ("proposer", "tag") if (v := getattr(chosen, n))}
    return about


def _remarks(job: JobRow, corrections: Corrections) -> Iterator[str]:
    if not job.state.is_final:
        yield f"job {job.job_id} is still {job.state}: these are the rows finished so far"
    if corrections.without_prompt:
        gone = f"the job's files are no longer in {job.workspace_uri}"
        why = gone if job.privacy.is_full else f"what is kept of the job is {job.privacy}"
        yield f"{corrections.without_prompt:,} rows have no prompt: {why}"
    for reason, n in _counted(corrections.left_out):
        yield f"left out: {n:,} completions that {reason}"


def _counted(left_out: Counter[str]) -> list[tuple[str, int]]:
    return [(reason, n) for reason, n in left_out.most_common() if n]
