"""Exports a small and a large job of a store that makes its completions up; prints peaks in MiB.

python exporting_memory.py FOLDER KIND COMPLETIONS
"""

from __future__ import annotations

import random
import resource
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from ledger.builders import new_job

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.operations.export import Exporter
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.exports import ExportKind, ExportOrder
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.records import CompletionRecord, JobRow
from support.databases import sqlite_store
from support.traced import traced


class Endless:
    """As much of a store as exporting reads: a job of so many completions, none of them kept."""

    def __init__(self, completions: int) -> None:
        self._completions = completions
        empty = sqlite_store()
        self._job = empty.create_job(new_job())[0]
        self._progress = replace(empty.progress(self._job.job_id), completions=completions)
        draw = random.Random(0)
        self._patterns = [traced(draw, row, passes=24)[0] for row in range(50)]

    def get_job(self, _job_id: str) -> JobRow:
        return self._job

    def note_action(self, *_: object) -> None:
        """Nothing is told of it."""

    def progress(self, _job_id: str) -> JobProgress:
        return self._progress

    def prompts_of(self, _job_id: str, _index: int) -> None:
        return None

    def completions(self, _job_id: str, **_: Any) -> Iterator[CompletionRecord]:
        for row in range(self._completions):
            pattern = self._patterns[row % len(self._patterns)]
            # Objects of its own, as of a database: not the same tuples again.
            tokens = tuple(token + 1000 + row for token in pattern.token_ids)
            logprobs = tuple(p - row * 1e-3 for p in pattern.logprobs)
            yield replace(pattern, row_index=row, token_ids=tokens, logprobs=logprobs)


def peak_mib(folder: str, kind: ExportKind, completions: int) -> float:
    """The process's peak after an export."""
    exporter = Exporter(cast(Store, Endless(completions)), Objects(), Objects())
    order = ExportOrder(kind, f"{folder}/{kind}-{completions}.parquet", so_far=True)
    assert exporter.export("job", order).rows >= completions
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    folder, kind, most = sys.argv[1], ExportKind(sys.argv[2]), int(sys.argv[3])
    print(*(round(peak_mib(folder, kind, n)) for n in (most // 4, most)))
