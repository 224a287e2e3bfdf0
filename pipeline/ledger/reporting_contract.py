"""What a store must tell for dashboards, `specbatch top` and reports. Part of `contract.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from specbatch.schemas.backlog import Backlog
from specbatch.schemas.job_figures import GroupFigures, RowFigures


class ReportingStore(Protocol):
    """Figures of the whole store and of jobs that no worker needs."""

    def backlog(self) -> Backlog:
        """What waits and who works now: cheap, to be asked every few seconds.

        It reads jobs that are not over, their groups' totals, and sessions that have not ended.
        """
        ...

    def group_figures(self, job_id: str) -> Iterator[GroupFigures]:
        """Of all groups of a job, by index; a page at a time."""
        ...

    def row_figures(self, job_id: str, batch: int = 1000) -> Iterator[RowFigures]:
        """Of all completions of a job by (row, sample), a page at a time: memory does not grow.

        No text is read, nor what text could be made of: whoever may see jobs may ask for it, and it
        is there after a purge.
        """
        ...
