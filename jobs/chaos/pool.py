"""Supervises workers: restarts killed ones and thaws frozen ones after their lease.

Nothing here sleeps. The pool's owner calls `turn` until its condition holds, and a turn ends as
soon as a worker sends a message or ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType

from specbatch.jobs.chaos.forkserver import ForkServer
from specbatch.jobs.chaos.orders import (
    NOTHING,
    Arming,
    Ask,
    Busy,
    Event,
    Fired,
    IsArmed,
    Order,
    Ready,
)
from specbatch.jobs.chaos.plan import Deed
from specbatch.schemas.errors import SpecbatchError

PATIENCE_SEC = 300.0  # for anything that is waited for
TURN_SEC = 0.02  # the longest turn without an event, before the store is polled
FROZEN_LEASES = 1.6  # a frozen worker is thawed after so many leases
_MOST_EARLY_ENDS = 200  # of workers that never got to work; an incident may keep them from it


class ChaosError(SpecbatchError):
    """The harness cannot continue; the message says what it waited for."""


@dataclass(slots=True)
class Member:
    """A member of the pool and its current process."""

    order: Order
    pid: int
    connection: Connection
    ready: bool = False
    armed: int | None = None  # the run that it is armed for
    busy: int | None = None  # its tasks; None: unknown, or the question is open
    thaw_at: float | None = None  # on the monotonic clock; None: it was never frozen

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def send(self, message: Arming | Ask) -> None:
        with contextlib.suppress(OSError):  # it just ended; its successor gets it at its start
            self.connection.send(message)


class Pool:
    """Workers of one store and one broker. One thread at a time."""

    def __init__(self, orders: list[Order], lease_sec: float, forkserver: ForkServer) -> None:
        """Workers are forks of `forkserver`."""
        self._orders = orders
        self._lease_sec = lease_sec
        self._forkserver = forkserver
        self._arming = NOTHING
        self._members: list[Member] = []
        self._early_ends = 0
        self.restarts = 0
        self.patience_sec = PATIENCE_SEC
        self.fired: deque[tuple[Member, Fired]] = deque()  # for the owner to take out

    def __enter__(self) -> Pool:
        self._members = [self._start(order) for order in self._orders]
        self.until(lambda: all(m.ready for m in self._members), "the workers to be ready")
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._end(self._members)

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    def arm(self, arming: Arming) -> None:
        """Send the disturbances to all workers, also to those that start later."""
        self._arming = arming
        self.thaw_all()
        for member in self._members:
            member.send(arming)
        self.until(
            lambda: all(m.armed == arming.run for m in self._members), "the workers to be armed"
        )

    def settle(self) -> None:
        """Thaw all workers and take turns until none has a task."""
        self.thaw_all()
        for member in self._members:
            member.busy = None
            member.send(Ask())
        self.until(self._all_idle, "the workers to be idle")

    def _all_idle(self) -> bool:
        for member in self._members:
            if member.busy:  # ask again
                member.busy = None
                member.send(Ask())
        return all(m.busy == 0 for m in self._members)

    def disturb(self, number: int, deed: Deed) -> None:
        """Kill or freeze a worker from outside at any moment."""
        member = self._members[number]
        member.signal(signal.SIGKILL if deed is Deed.KILL else signal.SIGSTOP)
        if deed is Deed.FREEZE:
            self._note_frozen(member)

    def hire(self, orders: Sequence[Order]) -> None:
        """Add workers until `let_go`. They are restarted like all others."""
        hired = [self._start(order) for order in orders]
        self._members += hired
        numbers = {order.number for order in orders}
        self.until(
            lambda: all(m.ready for m in self._members if m.order.number in numbers),
            "the added workers to be ready",
        )

    def let_go(self, orders: Sequence[Order]) -> None:
        """End workers that were hired."""
        numbers = {order.number for order in orders}
        leaving = [m for m in self._members if m.order.number in numbers]
        self._members = [m for m in self._members if m not in leaving]
        self._end(leaving)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Kill all workers, and restart them after the block."""
        self._end(self._members)
        self.restarts += len(self._members)
        yield
        self._members = [self._start(member.order) for member in self._members]

    def thaw_all(self) -> None:
        for member in self._members:
            self._thaw(member)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Take turns until `condition()`. Raises `ChaosError` after `patience_sec`."""
        begun_at = time.monotonic()
        while not condition():
            self.turn()
            if time.monotonic() - begun_at > self.patience_sec:
                raise ChaosError(f"waited in vain for {what}; {self._last_words()}")

    def turn(self) -> None:
        """Handle messages and ends of workers; restart and thaw those that are due."""
        connections = {member.connection: member for member in self._members}
        for connection in wait(list(connections), self._turn_sec()):
            assert isinstance(connection, Connection)
            self._hear(connections[connection])
        now = time.monotonic()
        for member in self._members:
            if member.thaw_at is not None and now >= member.thaw_at:
                self._thaw(member)

    def _turn_sec(self) -> float:
        thaws = [m.thaw_at - time.monotonic() for m in self._members if m.thaw_at is not None]
        return max(0.0, min([TURN_SEC, *thaws]))

    def _hear(self, member: Member) -> None:
        try:
            event = member.connection.recv()
        except (EOFError, OSError):
            self._replace(member)
            return
        self._take_in(member, event)

    def _take_in(self, member: Member, event: Event) -> None:
        match event:
            case Ready():
                member.ready = True
            case IsArmed(run):
                member.armed = run
            case Busy(tasks):
                member.busy = tasks
            case Fired() as fired:
                self.fired.append((member, fired))
                if self._may_be_frozen(fired):
                    self._note_frozen(member)

    def _may_be_frozen(self, fired: Fired) -> bool:
        """Whether a worker may be frozen, also by a past run. Thawing a running one is harmless."""
        over = fired.run != self._arming.run
        return over or self._arming.disturbances[fired.index].deed is Deed.FREEZE

    def _note_frozen(self, member: Member) -> None:
        member.thaw_at = time.monotonic() + FROZEN_LEASES * self._lease_sec

    def _thaw(self, member: Member) -> None:
        """Thaw repeatedly, because a worker may stop itself after the first SIGCONT."""
        if member.thaw_at is not None:
            member.signal(signal.SIGCONT)
            self._note_frozen(member)

    def _replace(self, member: Member) -> None:
        """Restart an ended worker, as a supervisor does."""
        self._bury(member)
        self.restarts += 1
        self._early_ends = 0 if member.ready else self._early_ends + 1
        if self._early_ends > _MOST_EARLY_ENDS:
            raise ChaosError(f"the workers end before they work; {self._last_words()}")
        self._members[self._members.index(member)] = self._start(member.order)

    def _end(self, members: Sequence[Member]) -> None:
        for member in members:
            member.signal(signal.SIGKILL)
        for member in members:
            self._bury(member)

    def _bury(self, member: Member) -> None:
        """Read the last messages of a worker that ends."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._take_in(member, member.connection.recv())
        member.connection.close()

    def _start(self, order: Order) -> Member:
        order = replace(order, arming=self._arming)
        pid, connection = self._forkserver.start(order)
        return Member(order, pid, connection, armed=self._arming.run, busy=0)

    def _last_words(self) -> str:
        """The ends of the workers' logs."""
        logs = {Path(order.log) for order in self._orders}
        ends = [f"{p.name}: {p.read_text(errors='replace')[-1500:]}" for p in logs if p.exists()]
        return "\n".join(["the workers' last words:", *ends])
