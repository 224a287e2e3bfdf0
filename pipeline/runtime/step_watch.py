"""Notices a step of an engine that does not end: a native call, a kernel or a device that hangs.

Heartbeats go on beside such a step, so its groups would stay leased for ever, and nobody would hear
that a job was cancelled. Threads cannot be ended from outside: the process must be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from specbatch.pipeline.engines.clock import now
from specbatch.schemas.errors import DeviceLostError, StepHungError
from specbatch.schemas.provenance import TICKS_PER_SEC


class Stepping(Protocol):
    """Engines of which one may hang."""

    @property
    def stepping_since(self) -> int | None: ...

    def give_up(self, error: DeviceLostError) -> None: ...


class StepWatch:
    """Asked to look now and then, from one thread; it gives engines up and raises nothing."""

    def __init__(
        self,
        hosts: Sequence[Stepping],
        deadline_sec: float,
        clock: Callable[[], int] = now,  # ticks
    ) -> None:
        self._hosts = hosts
        self._deadline_sec = deadline_sec
        self._clock = clock
        self._overdue: int | None = None  # when the step began that was too old at the last look

    def look(self) -> None:
        """Give all engines up where the same step is too old at two looks.

        Two, as a process that was stopped for an hour wakes up in a step that is an hour old.
        """
        begun = min(
            (since for host in self._hosts if (since := host.stepping_since) is not None),
            default=None,
        )
        if begun is None or self._clock() - begun < self._deadline_sec * TICKS_PER_SEC:
            self._overdue = None
            return
        if self._overdue != begun:
            self._overdue = begun
            return
        error = StepHungError(
            f"a step of the engine has not ended for {self._deadline_sec:g} s"
            " (SPECBATCH_STEP_DEADLINE_SEC): its device or a kernel hangs"
        )
        for host in self._hosts:  # engines of one process wait for each other's steps
            host.give_up(error)
