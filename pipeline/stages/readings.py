"""Inputs that are being read, which stay in memory while their job has enough open groups.

A paused reading keeps its ids and its place in the file, so that resuming costs nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specbatch.pipeline.inputs.contract import Source
from specbatch.pipeline.inputs.planner import PlannedGroup
from specbatch.schemas.records import SourcePosition

MOST_PAUSED = 8  # readings kept in memory; beyond that the oldest is dropped
MOST_WITH_PROCESS = 2  # of them keep the process that decodes; the others start one to resume

Place = tuple[SourcePosition | None, int, int]  # cursor, next row, next group


@dataclass(frozen=True, slots=True)
class Reading:
    """An input that is being read, and what the job's report keeps of it."""

    source: Source
    batches: Iterator[list[PlannedGroup]]
    identity: dict[str, Any]


class PausedReadings:
    """Readings of this process, by job. Thread-safe."""

    def __init__(self) -> None:
        self._paused: OrderedDict[str, tuple[Place, Reading]] = OrderedDict()  # the newest is last
        self._lock = threading.Lock()

    def put(self, job_id: str, place: Place, reading: Reading) -> None:
        with self._lock:
            self._paused[job_id] = (place, reading)
            self._paused.move_to_end(job_id)
            while len(self._paused) > MOST_PAUSED:
                self._paused.popitem(last=False)
            for _, paused in list(self._paused.values())[:-MOST_WITH_PROCESS]:
                paused.source.pause()

    def take(self, job_id: str, place: Place) -> Reading | None:
        """The reading that paused there. One elsewhere is stale: another worker read on."""
        with self._lock:
            paused = self._paused.pop(job_id, None)
        return paused[1] if paused is not None and paused[0] == place else None
