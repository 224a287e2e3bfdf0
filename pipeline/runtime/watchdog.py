"""Notices a step or a load of an engine that does not end: a native call, a kernel, a device or a
storage that hangs.

Heartbeats continue beside it, so its groups would stay leased for ever, and a cancelled
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
        load_deadline_sec: float,
        clock: Callable[[], int] = now,  # ticks
    ) -> None:
        """`deadline_sec`: of a step; `load_deadline_sec`: of a load, with the trial behind it."""
        self._hosts = hosts
        self._deadline_sec = deadline_sec
        self._load_deadline_sec = load_deadline_sec
        self._clock = clock
        self._overdue: int | None = None  # when what was too old at the last check had begun

    def check(self) -> None:
        """Give all engines up if the same step or load is too old at two checks.

        Two, because a process that was suspended for an hour wakes up in a step of that age.
        """
        begun, message = self._too_old() or (None, "")
        if begun is None or self._overdue != begun:
            self._overdue = begun
            return
        error = StepHungError(message)
        for host in self._hosts:  # engines of one process wait for each other's steps
            host.give_up(error)

    def _too_old(self) -> tuple[int, str] | None:
        """When it began, and what is wrong; None: nothing is."""
        steps = [since for host in self._hosts if (since := host.stepping_since) is not None]
        if steps and self._is_over(min(steps), self._deadline_sec):
            return min(steps), (
                f"a step of the engine has not ended for {self._deadline_sec:g} s"
                " (SPECBATCH_STEP_DEADLINE_SEC): its device or a kernel hangs"
            )
        loads = [since for host in self._hosts if (since := host.loading_since) is not None]
        if loads and self._is_over(min(loads), self._load_deadline_sec):
            return min(loads), (
                f"loading a model has not ended for {self._load_deadline_sec:g} s"
                " (SPECBATCH_LOAD_DEADLINE_SEC): its storage or its device hangs, or it needs more"
                " time than that"
            )
        return None

    def _is_over(self, begun: int, deadline_sec: float) -> bool:
        return self._clock() - begun >= deadline_sec * TICKS_PER_SEC
