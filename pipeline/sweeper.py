"""Re-rings the bell for every unit that is ready or whose lease ran out.

The broker may forget; the store does not. Sweeping twice, or from many processes, is harmless.
"""

from __future__ import annotations

import logging
import threading
import time

from specbatch.pipeline.client import Ring
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import StoreError
from specbatch.schemas.records import Bell

log = logging.getLogger(__name__)

PATIENCE_SEC = 30.0  # a bell that was rung gets so long before it counts as lost


class Sweeper:
    """Sweeps at once, then every `interval_sec`, in a thread of its own."""

    def __init__(self, store: Store, ring: Ring, interval_sec: float) -> None:
        self._store = store
        self._ring = ring
        self._interval_sec = interval_sec
        self._rung: dict[Bell, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def sweep(self) -> int:
        """Ring for what is due and was not rung for lately (else a long queue would fill up with
        doubles); returns how many bells."""
        now = time.monotonic()
        due = self._store.due()
        self._rung = {b: self._rung[b] for b in due if b in self._rung}
        late = [b for b in due if now - self._rung.get(b, -PATIENCE_SEC) >= PATIENCE_SEC]
        for bell in late:
            self._ring(bell)
            self._rung[bell] = now
        return len(late)

    def _run(self) -> None:
        while True:
            try:
                self.sweep()
            except StoreError as error:
                log.warning("sweep failed, the next one will do: %s", error)
            except Exception:
                log.exception("sweep failed, the next one will do")
            if self._stop.wait(self._interval_sec):
                return
