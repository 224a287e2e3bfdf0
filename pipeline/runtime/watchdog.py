"""Notices an engine step that does not end: a native call, a kernel or a device that hangs.

Heartbeats continue beside such a step, so its groups would stay leased for ever, and a cancelled
job would not stop. A thread cannot be ended from outside, so the process must end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specbatch.pipeline.engines.clock import now
from specbatch.pipeline.engines.contract import Engines
from specbatch.schemas.errors import StepHungError
from specbatch.schemas.provenance import TICKS_PER_SEC


class Watchdog:
    """Checks when it is called, from one thread. It gives engines up and raises nothing."""

    def __init__(
        self,
        hosts: Sequence[Engines],
        deadline_sec: float,
        clock: Callable[[], int] = now,  # ticks
    ) -> None:
        self._hosts = hosts
        self._deadline_sec = deadline_sec
        self._clock = clock
        self._overdue: int | None = None  # when the step began that was too old at the last check

    def check(self) -> None:
        """Give all engines up if the same step is too old at two checks.

        Two, because a process that was suspended for an hour wakes up in a step of that age.
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
