"""Device time: each 100-ns unit of a worker's device belongs to one attempt, or to nobody.

Engines count how long a step took and for whom (`engines/state/accounting.py`). The rest of
the clock, between steps and without work, is the worker's overhead and idle time. Every heartbeat
reports cumulative counters, and so does the end of the session; `ledger/contract.py` says why
that balances. Only workers with an engine have a device that is paid for, so those that only ingest
and record report no time.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, field
from typing import NamedTuple, TypeVar

from specbatch.pipeline.engines.clock import now
from specbatch.pipeline.engines.contract import Engines, Ticket
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import SessionEndedError, StoreError
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.provenance import NO_TICKS, Ticks
from specbatch.schemas.records import Lease
from specbatch.schemas.refusals import should_log
from specbatch.schemas.timekeeping import (
    HINTS,
    Attempt,
    Device,
    NewSession,
    SessionTime,
    Spent,
)

log = logging.getLogger(__name__)

T = TypeVar("T")


class Timing:
    """What the stages need of a timekeeper. This one is for workers without a device."""

    def working(self, attempt: Attempt) -> AbstractContextManager[list[Ticket]]:  # noqa: ARG002 - nobody counts
        """Charge the attempt with the device time of the tickets that are put in the list."""
        return nullcontext([])

    def commit(self, lease: Lease, write: Callable[[Spent | None], T]) -> T:  # noqa: ARG002 - the same
        """Call `write`, which stores an attempt's results, with the time that the attempt took.

        It is called again if the session had been ended meanwhile and nothing was written.
        """
        return write(None)


@dataclass(slots=True)
class StepFreeTime:
    """The time of a session in which no step ran, in 100-ns units."""

    idle: int = 0
    overhead: int = 0

    def grow(self, quiet: int, busy: int, unheld: int) -> None:
        """Assign the time that certainly passed without a step, and never take it back.

        `quiet`: a time up to which `busy` covers all steps; it may cover later steps, too. Let C(t)
        be the time that steps took up to t. Then busy ≥ C(quiet), and idle + overhead ≤
        quiet - C(quiet), the time without a step. That only grows, so what was assigned stays
        right, and busy + idle + overhead never exceeds the clock. When no step runs, quiet is now
        and busy is C(now), so both are equal.
        """
        more = max(0, quiet - busy - self.idle - self.overhead)
        idle = min(more, max(0, unheld - self.idle))
        self.idle += idle
        self.overhead += more - idle


@dataclass(slots=True)
class Account:
    """An attempt in this process."""

    attempt: Attempt
    tickets: list[Ticket] = field(default_factory=list)
    left: bool = False  # the stage has ended; an engine may still be at work

    def read(self) -> tuple[bool, Ticks]:
        """(whether that is final, ticks so far)."""
        tickets = list(self.tickets)
        is_over = self.left and all(ticket.is_over for ticket in tickets)
        return is_over, sum((ticket.ticks for ticket in tickets), NO_TICKS)


class Reading(NamedTuple):
    session: SessionTime
    attempts: Mapping[Attempt, Ticks]  # whose counters grew since the last report


class Timekeeper(Timing):
    """Keeps a worker process's session up to date in the store. Thread-safe."""

    def __init__(
        self,
        store: Store,
        owner: str,
        device: Device,
        hosts: Sequence[Engines],
        serves: Callable[[], Serves | None] | None = None,
        clock: Callable[[], int] = now,
    ) -> None:
        """`serves` returns the models this process verifies with, or None while these are unknown.
        Without it the process verifies nothing. It is called at heartbeats and must be quick.
        `clock`: the engines' clock, in 100-ns units."""
        self._store = store
        self._owner = owner
        self._device = device
        self._hosts = hosts
        self._serves = serves
        self._announced: Serves | None = None  # as the store knows it
        self._clock = clock
        self._lock = threading.Lock()  # guards all below; never held while the store is asked
        self._changing = threading.Lock()  # held to begin a session
        self._accounts: list[Account] = []
        self._past: dict[Attempt, Ticks] = {}  # over, but not fully reported
        self._held = 0  # attempts
        self._unheld = 0  # ticks without any, up to …
        self._free_since: int | None = clock()  # … this one; None: there are some
        self._closed = False
        self._begin_anew(at=clock(), before={})

    def _begin_anew(self, at: int, before: dict[Attempt, Ticks]) -> None:
        self._session_id = uuid.uuid4().hex
        self._is_known = False  # to the store
        self._origin = at
        self._before = before  # what attempts had in earlier sessions
        self._reported: dict[Attempt, Ticks] = {}
        self._settled = 0  # ticks of attempts that are over and reported
        self._step_free = StepFreeTime()
        self._unheld_before = self._unheld

    # --- attempts --------------------------------------------------------------------------------
    @contextmanager
    def working(self, attempt: Attempt) -> Iterator[list[Ticket]]:
        account = Account(attempt)
        with self._lock:
            self._accounts.append(account)
            self._held += 1
            if self._free_since is not None:
                self._unheld += self._clock() - self._free_since
                self._free_since = None
        try:
            yield account.tickets
        finally:
            with self._lock:
                account.left = True
                self._held -= 1
                if not self._held:
                    self._free_since = self._clock()

    def commit(self, lease: Lease, write: Callable[[Spent | None], T]) -> T:
        attempt = Attempt.of(lease)
        while True:
            self._introduce()
            with self._lock:
                session_id, ticks = self._session_id, self._totals().get(attempt, NO_TICKS)
                spent = Spent(session_id, self._clock() - self._origin, ticks)
            try:
                done = write(spent)
            except SessionEndedError:
                self._renew(session_id)
                continue
            self._note(Reading(SessionTime(session_id, spent.seen), {attempt: ticks}))
            if self._closed:
                self._end()
            return done

    # --- reports ---------------------------------------------------------------------------------
    def beat(self) -> None:
        """Report the counters so far."""
        try:
            while not self._report():
                log.warning("this worker was silent for too long; it begins a new session")
        except StoreError as error:
            if should_log(error):
                log.warning(
                    "could not report device time; retrying at the next heartbeat: %s", error
                )

    def _report(self) -> bool:
        """Whether the session continues; if not, a new one has begun. Raises `StoreError`."""
        self._introduce()
        reading = self._read()
        try:
            self._store.report_time(*reading)
        except SessionEndedError:
            self._renew(reading.session.session_id)
            return False
        self._note(reading)
        return True

    def close(self) -> None:
        """End the session."""
        self.beat()
        self._closed = True
        self._end()

    def _end(self) -> None:
        try:
            self._store.end_session(*self._read())
        except StoreError as error:
            if should_log(error):
                log.warning("could not close this worker's session; it will time out: %s", error)

    def _introduce(self) -> None:
        """Tell the store of the session, and of the models it serves now. Raises `StoreError`."""
        serves = None if self._serves is None else self._serves()
        with self._changing:
            if self._is_known and serves is not None and serves != self._announced:
                self._store.announce(self._session_id, serves)
                self._announced = serves
            if not self._is_known:
                age = self._clock() - self._origin
                self._store.begin_session(
                    NewSession(self._session_id, self._owner, self._device, age, serves)
                )
                self._is_known, self._announced = True, serves

    def _renew(self, ended: str) -> None:
        """Begin a new session where the ended one stopped. Raises `StoreError`."""
        with self._changing:
            if self._session_id != ended:
                return  # another thread has
            row = next(iter(self._store.sessions(session_id=ended)), None)
            had = {s.attempt: s.ticks for s in self._store.time_slices(session_id=ended)}
            with self._lock:
                known = {account.attempt for account in self._accounts} | set(self._past)
                before = {
                    attempt: self._before.get(attempt, NO_TICKS) + had.get(attempt, NO_TICKS)
                    for attempt in known
                }
                self._begin_anew(self._origin + ((row and row.leased) or 0), before)

    def _note(self, reading: Reading) -> None:
        """Remember what the store has."""
        with self._lock:
            if reading.session.session_id == self._session_id:
                self._reported.update(reading.attempts)

    def _read(self) -> Reading:
        """All counters. The clock is read before the tickets: see `StepFreeTime`."""
        at = self._clock()
        steps = [since for host in self._hosts if (since := host.stepping_since) is not None]
        quiet = min([at, *steps])
        with self._lock:
            totals = self._totals()
            free = 0 if self._free_since is None else max(0, at - self._free_since)
            unheld = self._unheld + free - self._unheld_before
            busy = self._settled + sum(ticks.total for ticks in totals.values())
            free_time, seen = self._step_free, at - self._origin
            free_time.grow(quiet - self._origin, busy, unheld)
            session = SessionTime(self._session_id, seen, free_time.idle, free_time.overhead)
            new = {a: t for a, t in totals.items() if t != self._reported.get(a, NO_TICKS)}
            return Reading(session, new)

    def _totals(self) -> dict[Attempt, Ticks]:
        """The time of this session's attempts, without those that are settled."""
        live, found = [], dict[Attempt, Ticks]()
        for account in self._accounts:
            is_over, ticks = account.read()
            of = self._past if is_over else found
            of[account.attempt] = of.get(account.attempt, NO_TICKS) + ticks
            if not is_over:
                live.append(account)
        self._accounts = live
        for attempt, ticks in list(self._past.items()):
            found[attempt] = found.get(attempt, NO_TICKS) + ticks
        totals = {a: _less(ticks, self._before.get(a, NO_TICKS)) for a, ticks in found.items()}
        self._hold_back(totals)
        for attempt in [a for a in self._past if self._is_settled(a, totals[a], live)]:
            self._settled += totals.pop(attempt).total
            for known in (self._past, self._before, self._reported):
                known.pop(attempt, None)
        return totals

    def _hold_back(self, totals: dict[Attempt, Ticks]) -> None:
        """Take out what belongs to an ended session.

        A step that began there is counted whole when it ends, but its time up to the session's end
        was booked there as lost. So more is counted than has passed; the excess is taken out.
        """
        passed = self._clock() - self._origin
        excess = self._settled + sum(ticks.total for ticks in totals.values()) - passed
        if excess <= 0:
            return
        for attempt in sorted(totals, key=lambda a: a not in self._before):  # old ones first
            new = _less(totals[attempt], self._reported.get(attempt, NO_TICKS))
            early = _first(excess, new)
            self._before[attempt] = self._before.get(attempt, NO_TICKS) + early
            totals[attempt] = _less(totals[attempt], early)
            excess -= early.total

    def _is_settled(self, attempt: Attempt, ticks: Ticks, live: Sequence[Account]) -> bool:
        """Whether it is over and reported. More hints may always come."""
        if attempt.generation == HINTS or any(a.attempt == attempt for a in live):
            return False
        return ticks == self._reported.get(attempt, NO_TICKS)


def _first(most: int, ticks: Ticks) -> Ticks:
    """At most so many of them, in the order of their kinds."""
    taken: list[int] = []
    for of_kind in astuple(ticks):
        taken.append(min(of_kind, most))
        most -= taken[-1]
    return Ticks(*taken)


def _less(ticks: Ticks, before: Ticks) -> Ticks:
    pairs = zip(astuple(ticks), astuple(before), strict=True)
    return Ticks(*(max(0, one - other) for one, other in pairs))
