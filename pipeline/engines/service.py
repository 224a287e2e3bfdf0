"""One engine for many callers: a thread steps it, and callers wait on tickets."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Protocol, TypeVar

from specbatch.pipeline.engines import step_guard
from specbatch.pipeline.engines.clock import now
from specbatch.pipeline.engines.contract import Completion, EngineStats, Request, RowIds, Wanted
from specbatch.pipeline.engines.state.recovery import engine_error
from specbatch.pipeline.engines.state.sequence import Sequence as RunningSequence
from specbatch.pipeline.policy.breaker import Lessons
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.schemas.crash_points import CrashPoint, reach
from specbatch.schemas.draft_switches import ALL_ON, DraftSwitches
from specbatch.schemas.errors import (
    BrokenModelError,
    DeviceLostError,
    EngineError,
    ModelLostError,
    NoEngineError,
    RequestCancelledError,
    SpecbatchError,
    UsageError,
)
from specbatch.schemas.provenance import Ticks
from specbatch.schemas.records import FinishReason
from specbatch.schemas.speculation import AcceptanceCount

T = TypeVar("T")

log = logging.getLogger(__name__)

KEEP_EVERY = 2000  # measured steps between two notes of what was learned
KEEP_AT_END = 50
CLOSED = "the engine was closed"
MAX_HINTS = 256  # that wait for the next step; beyond that the oldest are dropped


class SteppingEngine(Protocol):
    """What a service needs of an engine: continuous batching, a step at a time, in one thread.

    `Engine` is one, and says what each method does; a stand-in without a model is another.
    """

    @property
    def stats(self) -> EngineStats: ...

    @property
    def knowledge(self) -> Knowledge: ...

    @property
    def idle(self) -> bool: ...

    @property
    def unfinished(self) -> list[RunningSequence]: ...

    def prime(self, job: str, counts: Iterable[AcceptanceCount]) -> None: ...

    def add(self, request: Request) -> None: ...

    def cancel(self, matches: Callable[[Request], bool]) -> list[Completion]: ...

    def unstarted(self) -> list[str]: ...

    def hint(self, request_id: str, position: int, token_ids: tuple[int, ...]) -> None: ...

    def switch(self, switches: DraftSwitches) -> None: ...

    def prepare(self) -> None: ...

    def step(self) -> list[Completion]: ...

    def wanted(self) -> list[Wanted]: ...

    def lessons(self, job: str) -> Lessons: ...


class EngineService:
    """Runs one engine in a thread of its own.

    That thread calls `make_engine` at first and again after a failure: a failed pass fails its
    tickets (their groups are retried), not the process. A lost device ends the service: tickets
    fail with `DeviceLostError`, and new ones are refused. So does a model that cannot be loaded,
    with `ModelLostError`. A step holds `gate`, so that engines of one process take turns. The
    thread calls `keep` now and then and at the end with what the engine learned, and `on_wanted`
    for each request that wants a hint; neither may block.
    """

    def __init__(
        self,
        make_engine: Callable[[], SteppingEngine],
        gate: AbstractContextManager[object] | None = None,
        name: str = "engine",
        keep: Callable[[Knowledge], None] | None = None,
        on_wanted: Callable[[Wanted], None] | None = None,
    ) -> None:
        self._make_engine = make_engine
        self._on_wanted = on_wanted
        self._hints: deque[tuple[str, int, tuple[int, ...]]] = deque(maxlen=MAX_HINTS)
        self._switches = ALL_ON
        self._gate = gate or nullcontext()
        self._keep = keep
        self._kept_at = 0  # observations
        self._inbox: deque[EngineTicket] = deque()
        self._arrived: list[EngineTicket] = []  # taken out of it last, maybe waiting for an engine
        self._cancelled: set[str] = set()
        self._asked_back: dict[EngineTicket, RowIds] = {}
        self._tickets: dict[str, EngineTicket] = {}  # by request id
        self._changed = threading.Condition()
        self._closing = False
        self._lost: DeviceLostError | None = None
        self._is_given_up = False
        self._past = EngineStats()
        self._steps = 0  # of engines that failed: a step's number is its own in the process
        self._stepping_since: int | None = None
        self._loading_since: int | None = None
        self._engine: SteppingEngine | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, job_id: str, requests: Sequence[Request], priors: Sequence[AcceptanceCount] = ()
    ) -> EngineTicket:
        """Hand requests over; they join the running batch at its next step.

        `priors`: what earlier runs of the job found about drafts.
        """
        ticket = EngineTicket(job_id, requests, priors, self._ask_back)
        with self._changed:
            self.check()
            if self._closing:
                raise RequestCancelledError("the engine is closed")
            self._inbox.append(ticket)
            self._changed.notify()
        reach(CrashPoint.SUBMIT)
        return ticket

    def switch(self, switches: DraftSwitches) -> None:
        """From the next step on, nothing is drafted for what is switched off."""
        self._switches = switches

    def hint(self, request_id: str, position: int, token_ids: tuple[int, ...]) -> None:
        """Suggest, before the next step, what follows the first `position` output tokens.

        A hint for an unknown request is ignored, so this wakes nobody.
        """
        self._hints.append((request_id, position, token_ids))

    def _ask_back(self, ticket: EngineTicket, units: RowIds) -> None:
        with self._changed:
            self._asked_back[ticket] = units
            self._changed.notify()

    def check(self) -> None:
        """Raises `DeviceLostError` once the device is lost."""
        if self._lost is not None:
            raise _blameless(self._lost)

    def cancel(self, job_id: str) -> None:
        """Drop all requests of a job before the next step; their tickets raise."""
        with self._changed:
            self._cancelled.add(job_id)
            self._changed.notify()

    def stop(self) -> None:
        """Begin to close, without waiting. If no step runs, tickets fail at once: the thread may
        be making an engine, or wait for another one to be made, which takes minutes.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
            if self._stepping_since is None:
                self._fail_open(RequestCancelledError(CLOSED))

    def give_up(self, error: DeviceLostError) -> None:
        """The current step or load will not end. All tickets fail, new ones are refused, and
        `close` does not wait. Should it end after all, its result is dropped."""
        with self._changed:
            self._lost = error
            self._is_given_up = True
            self._changed.notify()
            self._fail_open(error)

    def _fail_open(self, error: SpecbatchError) -> None:
        # A list of them is made in one go, whatever the thread does meanwhile.
        for ticket in [*self._inbox, *self._arrived, *list(self._tickets.values())]:
            ticket.fail(error)

    def close(self) -> None:
        """Stop after the current step; open tickets fail with `RequestCancelledError`."""
        self.stop()
        if self._is_given_up:
            return
        self._thread.join()
        self._past, self._engine = self.stats, None  # its memory must not wait for ours

    @property
    def has_engine(self) -> bool:
        return self._engine is not None

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats if self._engine is not None else self._past

    @property
    def stepping_since(self) -> int | None:
        """When the running step began, by `clock.now`; None: no step runs."""
        return self._stepping_since

    @property
    def loading_since(self) -> int | None:
        """When the engine began to load or to try a model, by `clock.now`; None: it does not."""
        return self._loading_since

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (
                    self._inbox
                    or self._cancelled
                    or self._asked_back
                    or self._closing
                    or self._is_given_up
                    or self._tickets
                ):
                    self._changed.wait()
                arrived = self._arrived = list(self._inbox)
                self._inbox.clear()
                cancelled, self._cancelled = self._cancelled, set()
                asked_back, self._asked_back = self._asked_back, {}
                closing = self._closing or self._is_given_up
            if closing:
                self._learn(at_end=True)
                self._fail_all(arrived, RequestCancelledError(CLOSED))
                return
            try:
                self._step(arrived, cancelled, asked_back)
            except BaseException as error:  # a panic of a Rust library, too: tickets wait for us
                self._fail_step(error, arrived)
                if self._lost is not None:
                    return

    def _fail_step(self, error: BaseException, arrived: list[EngineTicket]) -> None:
        """No engine can be made, or a step failed and the engine with it."""
        if self._engine is not None:
            self._steps = self._engine.stats.steps
        self._engine = None
        failure: SpecbatchError
        if isinstance(error, (ModelLostError, NoEngineError, UsageError)):
            log.error("no engine can be made: %s", error)
            failure = error  # a `UsageError`: no retry will help, and no row is at fault
        else:
            log.exception("engine step failed; its requests are given back")
            failure = engine_error(error, "engine step")
        if isinstance(failure, DeviceLostError):
            for ticket in self._lose(failure):
                ticket.fail(_blameless(failure))
        self._fail_all(arrived, failure)

    def _learn(self, at_end: bool = False) -> None:
        """Keep what was learned, if that is much more than the last time."""
        if self._engine is None or self._keep is None:
            return
        seen = self._engine.knowledge.step_time.observations
        new = seen - self._kept_at
        if new >= (KEEP_AT_END if at_end else KEEP_EVERY):
            self._kept_at = seen
            self._keep(self._engine.knowledge)

    def _lose(self, error: DeviceLostError) -> list[EngineTicket]:
        """Refuse new tickets; returns those that came during the failed step."""
        with self._changed:
            self._lost = error
            late = list(self._inbox)
            self._inbox.clear()
        return late

    def _step(
        self,
        arrived: list[EngineTicket],
        cancelled: set[str],
        asked_back: dict[EngineTicket, RowIds],
    ) -> None:
        if self._engine is None:
            if not arrived:
                return  # what was to be cancelled or given back is gone with the engine
            # Loading sets torch's default dtype for every thread: no other engine may step then.
            with self._gate, self._loading():
                if not self._closing:
                    self._engine = made(self._make_engine)
                    self._engine.stats.steps = self._steps
                    self._kept_at = self._engine.knowledge.step_time.observations  # earlier
        if self._closing or self._engine is None:  # meanwhile; nobody waits for a step any more
            self._fail_all(arrived, RequestCancelledError(CLOSED))
            return
        for ticket in arrived:
            self._supersede(ticket, self._engine)
            self._engine.prime(ticket.job_id, ticket.priors)
            for request in ticket.requests:
                self._tickets[request.request_id] = ticket
                self._engine.add(request)
            ticket.watch(self._engine.unfinished)
        if cancelled:
            self._deliver(
                self._engine.cancel(lambda r: self._tickets[r.request_id].job_id in cancelled)
            )
        for ticket, units in asked_back.items():
            self._give_back(ticket, units, self._engine)
        self._pass_hints(self._engine)
        self._engine.switch(self._switches)
        if not self._engine.idle:
            self._deliver_step(self._engine)
            if self._on_wanted is not None:
                for wanted in self._engine.wanted():
                    self._on_wanted(wanted)
            self._learn()

    def _deliver_step(self, engine: SteppingEngine) -> None:
        with self._gate:
            if not self._closing:
                with self._loading():
                    engine.prepare()  # it may load a model, which is no step
            self._stepping_since = now()
            step_guard.begins()
            try:  # `stop` sets its flag first and then looks at ours: no step runs unseen
                finished = [] if self._closing else engine.step()
            finally:
                step_guard.ends()
                self._stepping_since = None  # what it took is with the tickets
        self._deliver(finished)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """A model may be loaded meanwhile, which has a deadline of its own."""
        self._loading_since = now()
        try:
            yield
        finally:
            self._loading_since = None

    def _pass_hints(self, engine: SteppingEngine) -> None:
        while self._hints:
            engine.hint(*self._hints.popleft())

    def _give_back(self, ticket: EngineTicket, units: RowIds, engine: SteppingEngine) -> None:
        """Take the last unstarted units out of the engine and the ticket, at once."""
        mine = {request.request_id for request in ticket.requests}
        units = [unit for unit in units if mine.issuperset(unit)]  # it may have been asked before
        unstarted = {i for i in engine.unstarted() if self._tickets.get(i) is ticket}
        given = {i for unit in last_unstarted(units, unstarted) for i in unit}
        if not given:
            return
        engine.cancel(lambda r: r.request_id in given)
        for request_id in given:
            del self._tickets[request_id]
        if len(ticket.completions) + len(given) == len(ticket.requests):
            ticket.lessons = engine.lessons(ticket.job_id)
        ticket.give_back(given)

    def _supersede(self, ticket: EngineTicket, engine: SteppingEngine) -> None:
        """Drop older tickets for the same requests: their group came back under a newer lease."""
        older = {self._tickets.get(request.request_id) for request in ticket.requests} - {None}
        if not older:
            return
        engine.cancel(lambda r: self._tickets.get(r.request_id) in older)
        self._tickets = {k: t for k, t in self._tickets.items() if t not in older}
        for stale in older:
            if stale is not None:
                stale.fail(RequestCancelledError("a newer attempt took the requests over"))

    def _deliver(self, completions: list[Completion]) -> None:
        for completion in completions:
            ticket = self._tickets.pop(completion.request_id, None)
            if ticket is None:
                continue  # superseded
            if self._engine is not None and ticket.lacks_one:
                ticket.lessons = self._engine.lessons(ticket.job_id)
            ticket.put(completion)

    def _fail_all(self, arrived: list[EngineTicket], error: SpecbatchError) -> None:
        for ticket in {*self._tickets.values(), *arrived}:
            ticket.fail(error)
        self._tickets.clear()


def made(make: Callable[[], T]) -> T:
    """A new engine, or a part of one that loads the model.

    Raises `NoEngineError` if a retry may work, and `ModelLostError` if the model's files are at
    fault: in neither case a row is.
    """
    try:
        return make()
    except BrokenModelError as error:  # whatever the job
        raise ModelLostError(str(error)) from None
    except SpecbatchError as error:
        if type(error) is EngineError:
            raise NoEngineError(str(error)) from error
        raise
    except Exception as error:
        failure = engine_error(error, "making an engine")
        if isinstance(failure, DeviceLostError):
            raise failure from error
        raise NoEngineError(str(failure)) from error


class EngineTicket:
    """A caller's requests, all of one job. `wait` returns when the last is finished."""

    def __init__(
        self,
        job_id: str,
        requests: Sequence[Request],
        priors: Sequence[AcceptanceCount] = (),
        ask_back: Callable[[EngineTicket, RowIds], None] = lambda *_: None,
    ) -> None:
        """`ask_back` has `give_back` called in the engine's thread, between two steps."""
        self.job_id = job_id
        self._ask_back = ask_back
        self.requests = tuple(requests)
        self.priors = tuple(priors)
        self.lessons = Lessons()  # of its job, once all is done
        self.completions: dict[str, Completion] = {}
        self.begun_ns = time.time_ns()
        self.ended_ns: dict[str, int] = {}
        # What the engine counts for each of its sequences; they outlive those, whatever the end.
        self._times: Sequence[Sequence[int]] = ()
        self._done = threading.Event()
        self._error: SpecbatchError | None = None
        self._given_back: list[Request] = []
        self._news = threading.Condition()
        if not requests:
            self._end()

    def wait(self, timeout_sec: float | None = None) -> list[Completion]:
        """Completions in the order of the requests, without those that were given back.

        Raises `RequestCancelledError`, `EngineError` when the engine failed or the time is over,
        or the `UsageError` for which no engine can be made.
        """
        if not self._done.wait(timeout_sec):
            raise EngineError(f"the engine did not finish within {timeout_sec:.0f} s")
        if self._error is not None:
            raise self._error
        return [self.completions[r.request_id] for r in self.requests]

    def ask_back(self, units: RowIds) -> None:
        """Ask for half of what the engine has not started, before its next step.

        `units`: ids of the requests in order; those of one unit stay together. Units are given back
        from the end; `next_given_back` returns them. Nothing happens if all are started.
        """
        if not self._done.is_set():
            self._ask_back(self, units)

    def next_given_back(self) -> list[Request]:
        """Wait until requests are given back; empty once all others are done."""
        with self._news:
            self._news.wait_for(lambda: self._given_back or self._done.is_set())
            given_back, self._given_back = self._given_back, []
            return given_back

    def finished(self) -> list[Completion]:
        """Completions so far in the order of the requests, without cancelled ones."""
        known = [self.completions.get(request.request_id) for request in self.requests]
        return [c for c in known if c and c.finish_reason is not FinishReason.CANCELLED]

    @property
    def ticks(self) -> Ticks:
        """The requests' share of the engine's time so far, whatever became of them."""
        return Ticks(*map(sum, zip(*self._times, strict=True)))

    @property
    def is_over(self) -> bool:
        """Whether the engine will spend no more time on it."""
        return self._done.is_set()

    # --- what the engine's thread does -----------------------------------------------------------
    def watch(self, begun: Iterable[RunningSequence]) -> None:
        """Its requests joined the engine; `begun` are all of that engine's sequences."""
        mine = {request.request_id for request in self.requests}
        self._times = [s.time for s in begun if s.request.request_id in mine]

    def put(self, completion: Completion) -> None:
        self.completions[completion.request_id] = completion
        self.ended_ns[completion.request_id] = time.time_ns()
        if completion.finish_reason is FinishReason.CANCELLED:
            self.fail(RequestCancelledError(f"job {self.job_id} was cancelled"))
        elif len(self.completions) == len(self.requests):
            self._end()
        else:
            reach(CrashPoint.VERIFY)

    def give_back(self, ids: Collection[str]) -> None:
        """The engine dropped these requests; the caller may run them elsewhere."""
        given_back = [r for r in self.requests if r.request_id in ids]
        self.requests = tuple(r for r in self.requests if r.request_id not in ids)
        with self._news:
            self._given_back += given_back
            self._news.notify_all()
        if len(self.completions) == len(self.requests):
            self._end()

    @property
    def lacks_one(self) -> bool:
        """Whether the next completion is the last."""
        return len(self.completions) + 1 == len(self.requests)

    def fail(self, error: SpecbatchError) -> None:
        """Fail from any thread. A finished ticket stays finished."""
        with self._news:
            if not self._done.is_set():
                self._error = error
                self._end()

    def _end(self) -> None:
        with self._news:
            self._done.set()
            self._news.notify_all()


def last_unstarted(units: RowIds, unstarted: Collection[str]) -> RowIds:
    """Half of the unstarted units at the end; never all units.

    `unstarted`: ids of requests that no pass has included. A unit is started if any is missing.
    """
    count = 0
    for unit in reversed(units):
        if not all(request_id in unstarted for request_id in unit):
            break
        count += 1
    given = min((count + 1) // 2, len(units) - 1)
    return units[len(units) - given :]


def _blameless(error: DeviceLostError) -> DeviceLostError:
    """The same for tickets that were not in the step that failed: they did not cause it."""
    found = copy(error)
    found.blameless = True
    return found
