"""What a store knows of workers: who is alive, where, at which price, and what is left to do."""

from __future__ import annotations

from typing import Protocol

from specbatch.schemas.backlog import Alive, OpenJob
from specbatch.schemas.presence import WorkerProcess


class Placing(Protocol):
    """Worker processes, and what placement by price decides by."""

    def report_process(self, process: WorkerProcess, trouble: str | None) -> None:
        """A process lives. `trouble` says why it can take no messages; None: it can."""

    def forget_process(self, process_id: str) -> None:
        """A process has ended."""

    def forget_silent_processes(self, patience_sec: float) -> int:
        """Forget processes that were silent for so long; return how many."""

    def alive(self, silence_sec: float) -> Alive:
        """Workers and processes with a heartbeat since then."""

    def open_jobs(self) -> list[OpenJob]:
        """Live jobs with groups to propose or to verify, without cancelled ones; by id."""
