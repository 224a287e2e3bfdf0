"""Keeps this process's leases alive, and tells the work when it must stop.

A process claims under a name of its own, `owner_here`; `is_dead_here` recognises the names of
processes of this machine that have ended.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.observe.tracing.span_names import LEASE_LOST, STOPPED
from specbatch.pipeline.observe.tracing.tracing import NO_SPAN, Span
from specbatch.schemas.errors import FencedError, StoreError
from specbatch.schemas.records import Lease, Stage
from specbatch.schemas.refusals import should_log
from specbatch.schemas.usage import Prices, UsageMeter

log = logging.getLogger(__name__)

CHECK_SEC = 1.0  # between two checks whether jobs in work must stop
_LATE_SEC = 0.05  # the store's clock may be behind ours: check a passed deadline so often ...
_MOST_LATE_SEC = 5.0  # ... for so long


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
    split_wanted: bool = False  # an idle worker asks for half of the group
    span: Span = NO_SPAN  # of the attempt
    usage: UsageMeter = field(default_factory=UsageMeter)  # what the attempt uses
    on_split_wanted: Callable[[], None] = lambda: None

    def when_asked_to_split(self, on_split_wanted: Callable[[], None]) -> None:
        """Call this when an idle worker asks for half of the group, or now if one has asked.

        It runs in the keeper's thread and must not block.
        """
        self.on_split_wanted = on_split_wanted
        if self.split_wanted:
            on_split_wanted()

    def check(self) -> None:
        """Raises `FencedError` when the lease is known to be lost."""
        if self.lost.is_set():
            raise FencedError(f"the lease on {self.lease} was lost")


class LeaseKeeper:
    """Sends one heartbeat for all leases of the process, three times in a lease's lifetime.

    It checks whether jobs must stop more often than that, and at once when a deadline passes.
    """

    def __init__(
        self,
        store: Store,
        lease_sec: float,
        check_sec: float = CHECK_SEC,
        unit_prices: Prices | None = None,
    ) -> None:
        """`unit_prices`: of what attempts use beside devices."""
        self._prices = unit_prices
        self._beside: list[Callable[[], None]] = []
        self._at_checks: list[Callable[[], None]] = []
        self._store = store
        self._lease_sec = lease_sec
        self._check_sec = check_sec
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

        Only a store that was restored from a copy gives out the same lease twice. The earlier
        holder has lost it: it may have read from a store that no longer exists.
        """
        held = Held(lease, on_cancel, span=span, usage=UsageMeter(self._prices))
        with self._lock:
            earlier = self._held.get(lease)
            self._held[lease] = held
        if earlier is not None:
            log.warning("%s was leased twice: the store was restored from a copy", lease)
            earlier.lost.set()
        try:
            with held.usage.measuring():
                yield held
        finally:
            with self._lock:
                if self._held.get(lease) is held:
                    del self._held[lease]
            self._report({lease: held.usage})

    def watch_deadline(self, held: Held, deadline_at: float | None) -> None:
        """Check again when the deadline (seconds since the epoch) passes."""
        if deadline_at is not None:
            held.deadline_at = deadline_at
            self._sooner.set()

    def at_heartbeats(self, beside: Callable[[], None]) -> None:
        """Call `beside` at every heartbeat, whether there are leases or not."""
        self._beside.append(beside)

    def at_checks(self, beside: Callable[[], None]) -> None:
        """Call `beside` whenever it is checked whether jobs must stop, while there are leases."""
        self._at_checks.append(beside)

    def holds(self, stage: Stage) -> bool:
        """Whether this process holds a group at this stage."""
        with self._lock:
            return any(lease.stage is stage for lease in self._held)

    def confirm(self, held: Held) -> None:
        """Ask the store now whether the lease is still held; no answer is not a yes.

        A process that was suspended does not know before its next heartbeat. Raises `FencedError`
        when another worker has the lease, and `StoreError` when the store does not answer.
        """
        self._beat()
        held.check()

    def close(self) -> None:
        self._stop.set()
        self._sooner.set()
        self._thread.join()

    def beat(self) -> None:
        """Send a heartbeat now."""
        try:
            self._beat()
        except StoreError as error:
            if should_log(error):
                log.warning("heartbeat failed, leases may expire: %s", error)

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
        _cancel(held, beat.cancelled)
        for entry in held.values():
            asked, entry.split_wanted = entry.split_wanted, entry.lease in beat.split_wanted
            if entry.split_wanted and not asked:
                entry.on_split_wanted()

    def report_usage(self) -> None:
        """Store what the attempts in hand used so far: a killed process reports no more."""
        with self._lock:
            meters = {lease: held.usage for lease, held in self._held.items()}
        self._report(meters)

    def _report(self, meters: Mapping[Lease, UsageMeter]) -> None:
        open_ones = {lease: usage for lease, usage in meters.items() if not usage.is_over}
        try:
            if open_ones:
                self._store.report_usage(open_ones)
        except StoreError as error:
            if should_log(error):
                log.info("could not report what attempts used: %s", error)

    def check_cancelled(self) -> None:
        """Ask now which jobs in work must stop, and stop the work on them."""
        with self._lock:
            held = dict(self._held)
        running = {x: entry for x, entry in held.items() if not entry.cancelled.is_set()}
        if not running:
            return
        try:
            stopped = self._store.cancelled_jobs(
                {x: entry.spent_usd() for x, entry in running.items()}
            )
        except StoreError as error:
            if should_log(error):
                log.info("could not ask which jobs must stop; will retry: %s", error)
            return
        _cancel(running, stopped)

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
                self.check_cancelled()
                for beside in self._at_checks if self._held else ():
                    beside()
            except Exception:  # the next one may succeed; without any, all leases would expire
                log.exception("heartbeat failed, leases may expire")

    def _wait_sec(self, beat_at: float) -> float:
        wait = min(self._check_sec, beat_at - time.monotonic())
        with self._lock:
            deadlines = [
                held.deadline_at
                for held in self._held.values()
                if held.deadline_at is not None and not held.cancelled.is_set()
            ]
        for left in (deadline_at - time.time() for deadline_at in deadlines):
            if left > -_MOST_LATE_SEC:  # else it was lifted since this process read it
                wait = min(wait, max(_LATE_SEC, left))
        return max(0.0, wait)


def _cancel(held: Mapping[Lease, Held], cancelled: set[str]) -> None:
    """Mark all groups of the jobs before an engine is told, which ends the work on all of them."""
    stopped = [
        entry
        for entry in held.values()
        if entry.lease.job_id in cancelled and not entry.cancelled.is_set()
    ]
    for entry in stopped:
        entry.cancelled.set()
    for entry in stopped:
        entry.span.event(STOPPED)
        entry.on_cancel()


# --- names of the processes that hold leases ------------------------------------------------------
def owner_here(pid: int | None = None) -> str:
    """The name under which this process claims, or another one of this machine."""
    return f"{socket.gethostname()}:{os.getpid() if pid is None else pid}"


def is_dead_here(owner: str) -> bool:
    """Whether it names a process of this machine that has ended.

    Containers may share a machine's name but not its processes. A lease that is taken from a live
    process by mistake costs that process its work and nothing else: its fencing token is stale.
    """
    machine, _, number = owner.rpartition(":")
    if machine != socket.gethostname() or not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it is another user's
        return False
    return _is_zombie(int(number))


def _is_zombie(pid: int) -> bool:
    """Whether the process has ended and its parent has not yet waited for it."""
    try:
        stat = (Path("/proc") / str(pid) / "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "Z"
