"""Keeps this process's leases alive, and tells the work when it may no longer go on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.observe.tracing.span_names import LEASE_LOST, STOPPED
from specbatch.pipeline.observe.tracing.tracing import NO_SPAN, Span
from specbatch.schemas.errors import FencedError, StoreError
from specbatch.schemas.records import Lease, Stage
from specbatch.schemas.refusals import is_news

log = logging.getLogger(__name__)

LOOK_SEC = 1.0  # between two looks whether jobs in work are to stop
_LATE_SEC = 0.05  # by the store's clock a deadline may pass a little later than by ours, so look
_MOST_LATE_SEC = 5.0  # so often for so long


def _nothing() -> float:
    return 0.0


@dataclass(slots=True)
class Held:
    """A lease in use."""

    lease: Lease
    on_cancel: Callable[[], None]
    lost: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    deadline_at: float | None = None  # of its job
    spent_usd: Callable[[], float] = _nothing  # what the attempt has cost so far
    cut_wanted: bool = False
    span: Span = NO_SPAN  # what a trace is told of the work
    on_cut: Callable[[], None] = lambda: None

    def when_cut(self, on_cut: Callable[[], None]) -> None:
        """`on_cut` runs when, or if already, somebody idle asks for half of the group.

        It runs in the keeper's thread and may not block.
        """
        self.on_cut = on_cut
        if self.cut_wanted:
            on_cut()

    def check(self) -> None:
        """Raises `FencedError` when the lease is known to be lost."""
        if self.lost.is_set():
            raise FencedError(f"the lease on {self.lease} was lost")


class LeaseKeeper:
    """One heartbeat for all leases of the process, three to a lease's lifetime.

    More often, and at once when a deadline passes, it looks whether a job is to stop.
    """

    def __init__(self, store: Store, lease_sec: float, look_sec: float = LOOK_SEC) -> None:
        self._beside: list[Callable[[], None]] = []
        self._store = store
        self._lease_sec = lease_sec
        self._look_sec = look_sec
        self._held: dict[Lease, Held] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._sooner = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)
        self._thread.start()

    @contextmanager
    def hold(
        self, lease: Lease, on_cancel: Callable[[], None] = lambda: None, span: Span = NO_SPAN
    ) -> Iterator[Held]:
        """Keep the lease alive inside the block; `on_cancel` runs once if the job is cancelled.

        Only a store that was restored from a copy gives out the same lease twice. Whoever has it
        since before then has lost it: what he read may be of a store that is no more.
        """
        held = Held(lease, on_cancel, span=span)
        with self._lock:
            earlier = self._held.get(lease)
            self._held[lease] = held
        if earlier is not None:
            log.warning("%s was leased twice: the store was restored from a copy", lease)
            earlier.lost.set()
        try:
            yield held
        finally:
            with self._lock:
                if self._held.get(lease) is held:
                    del self._held[lease]

    def mind(self, held: Held, deadline_at: float | None) -> None:
        """Look again when the deadline (seconds since the epoch) passes."""
        if deadline_at is not None:
            held.deadline_at = deadline_at
            self._sooner.set()

    def at_heartbeats(self, beside: Callable[[], None]) -> None:
        """Have this called at every heartbeat, whether there are leases or not."""
        self._beside.append(beside)

    def holds(self, stage: Stage) -> bool:
        """Whether some group is held at this stage."""
        with self._lock:
            return any(lease.stage is stage for lease in self._held)

    def confirm(self, held: Held) -> None:
        """Ask the store now. Raises `FencedError` when the lease is somebody else's meanwhile: a
        process that was stopped for a while does not know it before its next heartbeat.

        Raises `StoreError` when the store gives no answer: nobody may take that for a yes.
        """
        self._beat()
        held.check()

    def close(self) -> None:
        self._stop.set()
        self._sooner.set()
        self._thread.join()

    def beat(self) -> None:
        """One heartbeat now."""
        try:
            self._beat()
        except StoreError as error:
            if is_news(error):
                log.warning("heartbeat failed, leases may run out: %s", error)

    def _beat(self) -> None:
        with self._lock:
            held = dict(self._held)
        if not held:
            return
        beat = self._store.heartbeat(list(held), self._lease_sec)
        for lease in beat.lost:
            if not held[lease].lost.is_set():
                held[lease].lost.set()
                held[lease].span.event(LEASE_LOST)
        _tell(held, beat.cancelled)
        for entry in held.values():
            asked, entry.cut_wanted = entry.cut_wanted, entry.lease in beat.cut_wanted
            if entry.cut_wanted and not asked:
                entry.on_cut()

    def look(self) -> None:
        """Ask now whether jobs in work are to stop, and have the work on them stopped."""
        with self._lock:
            held = dict(self._held)
        going_on = {x: entry for x, entry in held.items() if not entry.cancelled.is_set()}
        if not going_on:
            return
        try:
            stopped = self._store.cancelled_jobs(
                {x: entry.spent_usd() for x, entry in going_on.items()}
            )
        except StoreError as error:
            if is_news(error):
                log.info("could not ask whether jobs are to stop, the next look will: %s", error)
            return
        _tell(going_on, stopped)

    def _run(self) -> None:
        beat_at = time.monotonic() + self._lease_sec / 3
        while True:
            self._sooner.wait(self._wait_sec(beat_at))
            self._sooner.clear()
            if self._stop.is_set():
                return
            try:
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + self._lease_sec / 3
                    self.beat()
                    for beside in self._beside:
                        beside()
                self.look()
            except Exception:  # the next one may do; without any, all leases would run out
                log.exception("heartbeat failed, leases may run out")

    def _wait_sec(self, beat_at: float) -> float:
        wait = min(self._look_sec, beat_at - time.monotonic())
        with self._lock:
            deadlines = [
                held.deadline_at
                for held in self._held.values()
                if held.deadline_at is not None and not held.cancelled.is_set()
            ]
        for left in (deadline_at - time.time() for deadline_at in deadlines):
            if left > -_MOST_LATE_SEC:  # else it was lifted since this process read of it
                wait = min(wait, max(_LATE_SEC, left))
        return max(0.0, wait)


def _tell(held: Mapping[Lease, Held], cancelled: set[str]) -> None:
    """All know it before an engine is told: that ends the work on every group of the job."""
    told = [
        entry
        for entry in held.values()
        if entry.lease.job_id in cancelled and not entry.cancelled.is_set()
    ]
    for entry in told:
        entry.cancelled.set()
    for entry in told:
        entry.span.event(STOPPED)
        entry.on_cancel()
