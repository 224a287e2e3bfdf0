"""What a caller of an engine's service holds: requests on their way, and what came of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from specbatch.pipeline.engines.exact.state.sequence import Completion, Request
from specbatch.pipeline.engines.exact.state.sequence import Sequence as Sequence_
from specbatch.pipeline.policy.breaker import Lessons
from specbatch.schemas.crash_points import CrashPoint, reach
from specbatch.schemas.errors import EngineError, RequestCancelledError, SpecbatchError
from specbatch.schemas.provenance import Ticks
from specbatch.schemas.records import FinishReason
from specbatch.schemas.speculation import AcceptanceCount

# Ids of requests that are given back together or not at all, in the caller's order.
Units = Sequence[Sequence[str]]


class Ticket:
    """A caller's requests, all of one job. `wait` returns when the last is finished."""

    def __init__(
        self,
        job_id: str,
        requests: Sequence[Request],
        priors: Sequence[AcceptanceCount] = (),
        ask_back: Callable[[Ticket, Units], None] = lambda *_: None,
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

    def ask_back(self, units: Units) -> None:
        """Have half of what the engine has not started given back, before its next step.

        `units`: ids of the requests in order; those of one unit stay together. Units are given back
        from the end, and `next_given_back` tells them. Nothing happens where all are started.
        """
        if not self._done.is_set():
            self._ask_back(self, units)

    def next_given_back(self) -> list[Request]:
        """Waits until requests are given back, and returns them; none once all else is done."""
        with self._news:
            self._news.wait_for(lambda: self._given_back or self._done.is_set())
            given_back, self._given_back = self._given_back, []
            return given_back

    def finished(self) -> list[Completion]:
        """Those that have ended of themselves so far, in the order of the requests."""
        known = [self.completions.get(request.request_id) for request in self.requests]
        return [c for c in known if c and c.finish_reason is not FinishReason.CANCELLED]

    @property
    def ticks(self) -> Ticks:
        """The requests' share of the engine's time so far, whatever came of it."""
        return Ticks(*map(sum, zip(*self._times, strict=True)))

    @property
    def is_over(self) -> bool:
        """Whether no more time will be spent on it."""
        return self._done.is_set()

    # --- what the engine's thread does -----------------------------------------------------------
    def watch(self, begun: Iterable[Sequence_]) -> None:
        """Its requests have joined the engine: these are all of that one's sequences."""
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
        """These requests are the engine's no longer; the caller may have them done elsewhere."""
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
        """From any thread. Where all is done already, it stays so."""
        with self._news:
            if not self._done.is_set():
                self._error = error
                self._end()

    def _end(self) -> None:
        with self._news:
            self._done.set()
            self._news.notify_all()


def last_unstarted(units: Units, unstarted: Collection[str]) -> Units:
    """Half of the units at the end that are not started; never all of them.

    `unstarted`: ids of requests that no pass has seen. A unit with one that was seen is started.
    """
    count = 0
    for unit in reversed(units):
        if not all(request_id in unstarted for request_id in unit):
            break
        count += 1
    given = min((count + 1) // 2, len(units) - 1)
    return units[len(units) - given :]
