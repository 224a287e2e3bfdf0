"""One engine for many callers: a thread steps it, tickets wait for their completions."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from specbatch.pipeline.engine.engine import Engine, EngineStats
from specbatch.pipeline.engine.faults import engine_error
from specbatch.pipeline.engine.sequence import Completion, Request
from specbatch.schemas.errors import DeviceLostError, EngineError, RequestCancelledError
from specbatch.schemas.records import FinishReason

log = logging.getLogger(__name__)


class Ticket:
    """A caller's requests, all of one job. `wait` returns when the last is finished."""

    def __init__(self, job_id: str, requests: Sequence[Request]) -> None:
        self.job_id = job_id
        self.requests = tuple(requests)
        self.completions: dict[str, Completion] = {}
        self._done = threading.Event()
        self._error: EngineError | None = None
        if not requests:
            self._done.set()

    def wait(self, timeout_sec: float | None = None) -> list[Completion]:
        """Completions in the order of the requests.

        Raises `RequestCancelledError`, or `EngineError` when the engine failed or the time is over.
        """
        if not self._done.wait(timeout_sec):
            raise EngineError(f"the engine did not finish within {timeout_sec:.0f} s")
        if self._error is not None:
            raise self._error
        return [self.completions[r.request_id] for r in self.requests]

    def put(self, completion: Completion) -> None:
        self.completions[completion.request_id] = completion
        if completion.finish_reason is FinishReason.CANCELLED:
            self.fail(RequestCancelledError(f"job {self.job_id} was cancelled"))
        elif len(self.completions) == len(self.requests):
            self._done.set()

    def fail(self, error: EngineError) -> None:
        self._error = self._error or error
        self._done.set()


class EngineService:
    """Runs one engine in a thread of its own.

    `make_engine` is called in that thread, first and again after a failure: a failed pass takes its
    tickets with it (their groups are retried), not the process. A lost device ends the service:
    tickets fail with `DeviceLostError`, and no more are taken. `gate` is held during a step, so
    that engines of one process share the processor in turns.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        gate: AbstractContextManager[object] | None = None,
        name: str = "engine",
    ) -> None:
        self._make_engine = make_engine
        self._gate = gate or nullcontext()
        self._inbox: deque[Ticket] = deque()
        self._cancelled: set[str] = set()
        self._tickets: dict[str, Ticket] = {}  # by request id
        self._changed = threading.Condition()
        self._closing = False
        self._lost: DeviceLostError | None = None
        self._past = EngineStats()
        self._engine: Engine | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job_id: str, requests: Sequence[Request]) -> Ticket:
        """Hand requests over; they join the running batch at its next step."""
        ticket = Ticket(job_id, requests)
        with self._changed:
            self.check()
            if self._closing:
                raise RequestCancelledError("the engine is closed")
            self._inbox.append(ticket)
            self._changed.notify()
        return ticket

    def check(self) -> None:
        """Raises `DeviceLostError` once the device is lost."""
        if self._lost is not None:
            raise self._lost

    def cancel(self, job_id: str) -> None:
        """Drop all requests of a job before the next step; their tickets raise."""
        with self._changed:
            self._cancelled.add(job_id)
            self._changed.notify()

    def close(self) -> None:
        """Stop after the current step; open tickets fail with `RequestCancelledError`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._past, self._engine = self.stats, None  # its memory must not wait for ours

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats if self._engine is not None else self._past

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._inbox or self._cancelled or self._closing or self._tickets):
                    self._changed.wait()
                arrived = list(self._inbox)
                self._inbox.clear()
                cancelled, self._cancelled = self._cancelled, set()
                closing = self._closing
            if closing:
                self._fail_all(arrived, RequestCancelledError("the engine was closed"))
                return
            try:
                self._step(arrived, cancelled)
            except Exception as error:
                log.exception("engine step failed; its requests are given back")
                failure = engine_error(error, "engine step")
                self._engine = None
                if isinstance(failure, DeviceLostError):
                    arrived += self._lose(failure)
                self._fail_all(arrived, failure)
                if self._lost is not None:
                    return

    def _lose(self, error: DeviceLostError) -> list[Ticket]:
        """Take no more tickets; those that came during the failed step."""
        with self._changed:
            self._lost = error
            late = list(self._inbox)
            self._inbox.clear()
        return late

    def _step(self, arrived: list[Ticket], cancelled: set[str]) -> None:
        if self._engine is None:
            # Loading sets torch's default dtype for every thread: no other engine may step then.
            with self._gate:
                self._engine = self._make_engine()
        for ticket in arrived:
            self._supersede(ticket, self._engine)
            for request in ticket.requests:
                self._tickets[request.request_id] = ticket
                self._engine.add(request)
        if cancelled:
            self._deliver(
                self._engine.cancel(lambda r: self._tickets[r.request_id].job_id in cancelled)
            )
        if not self._engine.idle:
            with self._gate:
                finished = self._engine.step()
            self._deliver(finished)

    def _supersede(self, ticket: Ticket, engine: Engine) -> None:
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
            if ticket := self._tickets.pop(completion.request_id, None):  # None: superseded
                ticket.put(completion)

    def _fail_all(self, arrived: list[Ticket], error: EngineError) -> None:
        for ticket in {*self._tickets.values(), *arrived}:
            ticket.fail(error)
        self._tickets.clear()
