"""Some sites alike, for runs that take turns on them, and what befalls them from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from specbatch.jobs.chaos.harness import Running, Site

SITES = 2  # a run mostly waits: for leases to run out, for the frozen to thaw


@dataclass
class Sites:
    """Whoever takes one has it alone until it is put back."""

    free: SimpleQueue[Site] = field(default_factory=SimpleQueue)


@dataclass(frozen=True)
class Jolt:
    """A change of the surroundings, made when so many rows of the job are done."""

    name: str
    do: Callable[[], object]
    at_rows: int = 1


class Jolts(Running):
    """An incident of several such changes, one after another."""

    def __init__(self, *jolts: Jolt) -> None:
        self.waiting = list(jolts)
        self.done: list[str] = []
        self.is_over = False

    def move_on(self, rows_done: int) -> str | None:
        if not self.waiting or rows_done < self.waiting[0].at_rows:
            return None
        jolt = self.waiting.pop(0)
        jolt.do()
        self.done.append(jolt.name)
        self.is_over = not self.waiting
        return jolt.name

    def end(self) -> None:
        """The next job of the run meets what is left."""

    def close(self) -> None:
        """There is nothing to undo."""
