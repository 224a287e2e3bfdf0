"""Keeps this process's leases alive, and tells the work when it may no longer go on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import FencedError, StoreError
from specbatch.schemas.records import Lease

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Held:
    """A lease in use."""

    lease: Lease
    on_cancel: Callable[[], None]
    lost: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raises `FencedError` when the lease is known to be lost."""
        if self.lost.is_set():
            raise FencedError(f"the lease on {self.lease} was lost")


class LeaseKeeper:
    """One heartbeat for all leases of the process, three to a lease's lifetime."""

    def __init__(self, store: Store, lease_sec: float) -> None:
        self._store = store
        self._lease_sec = lease_sec
        self._held: dict[Lease, Held] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)
        self._thread.start()

    @contextmanager
    def hold(self, lease: Lease, on_cancel: Callable[[], None] = lambda: None) -> Iterator[Held]:
        """Keep the lease alive inside the block; `on_cancel` runs once if the job is cancelled."""
        held = Held(lease, on_cancel)
        with self._lock:
            self._held[lease] = held
        try:
            yield held
        finally:
            with self._lock:
                self._held.pop(lease, None)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def beat(self) -> None:
        """One heartbeat now."""
        with self._lock:
            held = dict(self._held)
        if not held:
            return
        try:
            lost, cancelled = self._store.heartbeat(list(held), self._lease_sec)
        except StoreError as error:
            log.warning("heartbeat failed, leases may run out: %s", error)
            return
        for lease in lost:
            held[lease].lost.set()
        for entry in held.values():
            if entry.lease.job_id in cancelled and not entry.cancelled.is_set():
                entry.cancelled.set()
                entry.on_cancel()

    def _run(self) -> None:
        while not self._stop.wait(self._lease_sec / 3):
            self.beat()
