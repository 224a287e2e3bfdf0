"""What a store must tell for dashboards, `specbatch top` and reports. Part of `contract.py`."""

from __future__ import annotations

from typing import Protocol

from specbatch.schemas.backlog import Backlog


class ReportingStore(Protocol):
    """Figures of the whole store and of jobs that no worker needs."""

    def backlog(self) -> Backlog:
        """What waits and who works now: cheap, to be asked every few seconds.

        It reads jobs that are not over, their groups' totals, and sessions that have not ended.
        """
        ...
