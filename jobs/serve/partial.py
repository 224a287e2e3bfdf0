"""What a batch has finished so far, as lines of its output file, while its job runs on.

Token texts of log-probabilities are only in the final file: here no tokenizer is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import orjson

from specbatch.jobs.serve.collecting import as_served
from specbatch.jobs.serve.errors import ApiError
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.outputs.openai import Lines
from specbatch.schemas.openai_formats import FORMATS
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import JobRow
from specbatch.schemas.serving import BatchRow

PAGE_ROWS = 200  # of the store at once


def partial_lines(store: Store, batch: BatchRow, job: JobRow) -> Iterator[bytes]:
    """Each finished request once, in input order. Raises `ApiError` if the store has no texts."""
    why = None if job.privacy is PrivacyMode.FULL else f"its privacy is {job.privacy}"
    if job.purged_at is not None:
        why = "it was purged"
    if why is not None:
        raise ApiError(
            409, f"texts of this batch are in its output file alone: {why}", "texts_not_kept"
        )
    return _lines(store, batch, job)


def _lines(store: Store, batch: BatchRow, job: JobRow) -> Iterator[bytes]:
    made = Lines(job.job_id, int(job.created_at), decode=None, format=FORMATS[batch.endpoint])
    records = store.completions(job.job_id, PAGE_ROWS, details=False)
    for _, samples in groupby(records, key=lambda record: record.row_index):
        line = as_served(made.line(list(samples)), batch.model or "", None)
        if line["error"] is None:
            yield orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
