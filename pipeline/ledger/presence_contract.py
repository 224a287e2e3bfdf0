"""What a store must know about worker processes: part of `Store`.

A process says again and again that it is there, and whether it can take messages. It is no lease
and no device time: nothing depends on it but what people are told.
"""

from __future__ import annotations

from typing import Protocol

from specbatch.schemas.presence import WorkerProcess


class PresenceStore(Protocol):
    """Worker processes that are there."""

    def tell_process(self, process: WorkerProcess, trouble: str | None) -> None:
        """The process lives; `trouble`: why it can take no messages, None: it can."""
        ...

    def forget_process(self, process_id: str) -> None:
        """It has ended."""
        ...

    def forget_silent_processes(self, patience_sec: float) -> int:
        """Forget those that nothing was heard of for so long; how many they were."""
        ...
