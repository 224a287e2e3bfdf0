"""Where a worker's time goes: each tick of its device is one attempt's, or nobody's.

Engines count, to the tick, what a step took and whose it was (`engines/exact/state/time_book.py`).
What is left of the clock, between steps and without work, is a worker's overhead and its idleness.
Told are all counters so far, with every heartbeat and at the end; why that balances,
`ledger/contract.py` says. Only workers with an engine have a device that is paid for: those
that read inputs and record keep no time.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from specbatch.pipeline.engines.contract import Engines, Submitted
from specbatch.pipeline.engines.exact.state.time_book import now
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import SessionEndedError, StoreError
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.provenance import NO_TICKS, Ticks
from specbatch.schemas.records import Lease
from specbatch.schemas.refusals import is_news
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


class Timing(Protocol):
    """What the stages need of it."""

    def working(self, attempt: Attempt) -> AbstractContextManager[list[Submitted]]:
        """What the tickets that are put in the list take is the attempt's, as long as they last."""
        ...

    def keeping(self, lease: Lease, write: Callable[[Spent | None], T]) -> T:
        """`write` keeps an attempt's results; the time it took goes with them.

        It may be called again, when nothing came of it because the session had been ended.
        """
        ...


class Untimed:
    """No device, no time."""

    def working(self, attempt: Attempt) -> AbstractContextManager[list[Submitted]]:  # noqa: ARG002 - nobody counts
        return nullcontext([])

    def keeping(self, lease: Lease, write: Callable[[Spent | None], T]) -> T:  # noqa: ARG002 - the same
        return write(None)


@dataclass(slots=True)
class Rest:
    """The time of a session in which no step ran."""

    idle: int = 0
    overhead: int = 0

    def grow(self, quiet: int, busy: int, unheld: int) -> None:
        """Give out what surely passed without a step, and never take it back.

        `quiet`: a tick up to which all steps are in `busy`; steps after it may be, too. Be C(t) the
        time that steps took up to t, so busy ≥ C(quiet), and idle + overhead ≤ quiet - C(quiet),
        what passed without a step. That rises with time, so what was given out stays right; and
        busy + idle + overhead is never more than the clock says now. When no step runs, quiet is
        now and busy is C(now), so they are the same.
        """
        more = max(0, quiet - busy - self.idle - self.overhead)
        idle = min(more, max(0, unheld - self.idle))
        self.idle += idle
        self.overhead += more - idle


@dataclass(slots=True)
class Account:
    """An attempt in this process."""

    attempt: Attempt
    tickets: list[Submitted] = field(default_factory=list)
    left: bool = False  # by who made it; engines may be at it still

    def read(self) -> tuple[bool, Ticks]:
        """(whether that is all it will ever be, ticks so far)."""
        tickets = list(self.tickets)
        is_over = self.left and all(ticket.is_over for ticket in tickets)
        return is_over, sum((ticket.ticks for ticket in tickets), NO_TICKS)


class Reading(NamedTuple):
    session: SessionTime
    attempts: Mapping[Attempt, Ticks]  # that have got on since they were told of


class Timekeeper:
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
        """`serves` tells what this process verifies with, or None while that is not known; no such
        function: it verifies nothing. It is asked at heartbeats and must not take long. `clock`: in
        ticks, the one that engines count with."""
        self._store = store
        self._owner = owner
        self._device = device
        self._hosts = hosts
        self._serves = serves
        self._announced: Serves | None = None  # as the store knows it
        self._clock = clock
        self._lock = threading.Lock()  # of all that follows; never held while the store is asked
        self._changing = threading.Lock()  # held to begin a session
        self._accounts: list[Account] = []
        self._past: dict[Attempt, Ticks] = {}  # over, but not told to the last tick
        self._held = 0  # attempts
        self._unheld = 0  # ticks without any, up to …
        self._free_since: int | None = clock()  # … this one; None: there are some
        self._closed = False
        self._begin_anew(at=clock(), before={})

    def _begin_anew(self, at: int, before: dict[Attempt, Ticks]) -> None:
        self._session_id = uuid.uuid4().hex
        self._is_known = False  # to the store
        self._origin = at
        self._before = before  # what attempts had of earlier sessions
        self._told: dict[Attempt, Ticks] = {}
        self._settled = 0  # ticks of attempts that are over and told of
        self._rest = Rest()
        self._unheld_before = self._unheld

    # --- what is worked on -----------------------------------------------------------------------
    @contextmanager
    def working(self, attempt: Attempt) -> Iterator[list[Submitted]]:
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

    def keeping(self, lease: Lease, write: Callable[[Spent | None], T]) -> T:
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

    # --- what is told ----------------------------------------------------------------------------
    def beat(self) -> None:
        """Tell what the time went into so far."""
        try:
            while not self._tell():
                log.warning("nothing was heard of this worker for long: it begins a new session")
        except StoreError as error:
            if is_news(error):
                log.warning(
                    "could not report device time; retrying at the next heartbeat: %s", error
                )

    def _tell(self) -> bool:
        """Whether the session goes on; if not, the next one does. Raises `StoreError`."""
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
        """The device is given back."""
        self.beat()
        self._closed = True
        self._end()

    def _end(self) -> None:
        try:
            self._store.end_session(*self._read())
        except StoreError as error:
            if is_news(error):
                log.warning("could not close this worker's session; it will time out: %s", error)

    def _introduce(self) -> None:
        """Have the store know the session, and what it serves now. Raises `StoreError`."""
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
        """Go on in a new session where the ended one left off. Raises `StoreError`."""
        with self._changing:
            if self._session_id != ended:
                return  # somebody has
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
        """It is in the store."""
        with self._lock:
            if reading.session.session_id == self._session_id:
                self._told.update(reading.attempts)

    def _read(self) -> Reading:
        """All counters. What the clock says is asked before what the tickets say: see `Rest`."""
        at = self._clock()
        steps = [since for host in self._hosts if (since := host.stepping_since) is not None]
        quiet = min([at, *steps])
        with self._lock:
            totals = self._totals()
            free = 0 if self._free_since is None else max(0, at - self._free_since)
            unheld = self._unheld + free - self._unheld_before
            busy = self._settled + sum(ticks.total for ticks in totals.values())
            self._rest.grow(quiet - self._origin, busy, unheld)
            seen = at - self._origin
            session = SessionTime(self._session_id, seen, self._rest.idle, self._rest.overhead)
            new = {a: t for a, t in totals.items() if t != self._told.get(a, NO_TICKS)}
            return Reading(session, new)

    def _totals(self) -> dict[Attempt, Ticks]:
        """What attempts have had of this session, but for those that are settled."""
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
            for known in (self._past, self._before, self._told):
                known.pop(attempt, None)
        return totals

    def _hold_back(self, totals: dict[Attempt, Ticks]) -> None:
        """Take out what belongs to an ended session. A step that began there is counted whole when
        it ends, but its time up to that session's end was booked there, as lost. So more ticks are
        counted than have passed, and that excess is taken out."""
        passed = self._clock() - self._origin
        excess = self._settled + sum(ticks.total for ticks in totals.values()) - passed
        if excess <= 0:
            return
        for attempt in sorted(totals, key=lambda a: a not in self._before):  # those of old first
            new = _less(totals[attempt], self._told.get(attempt, NO_TICKS))
            early = _first(excess, new)
            self._before[attempt] = self._before.get(attempt, NO_TICKS) + early
            totals[attempt] = _less(totals[attempt], early)
            excess -= early.total

    def _is_settled(self, attempt: Attempt, ticks: Ticks, live: Sequence[Account]) -> bool:
        """Over, and told of. Of hints there may always be more."""
        if attempt.generation == HINTS or any(a.attempt == attempt for a in live):
            return False
        return ticks == self._told.get(attempt, NO_TICKS)


def _first(most: int, ticks: Ticks) -> Ticks:
    """At most so many of them, by kind in order."""
    taken: list[int] = []
    for of_kind in astuple(ticks):
        taken.append(min(of_kind, most))
        most -= taken[-1]
    return Ticks(*taken)


def _less(ticks: Ticks, before: Ticks) -> Ticks:
    pairs = zip(astuple(ticks), astuple(before), strict=True)
    return Ticks(*(max(0, one - other) for one, other in pairs))
