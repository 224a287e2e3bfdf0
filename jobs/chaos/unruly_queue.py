"""Work messages that are doubled, held back and delivered in another order, as brokers may do."""

from __future__ import annotations

import random
import threading

from specbatch.pipeline.runtime.client import Enqueue
from specbatch.schemas.records import DueWork

_COPIES = (1, 1, 2, 3)
_HELD_BACK = 0.4  # of all messages, until others are sent; the last ones for ever


class UnrulyQueue:
    """Passes messages on to `enqueue` in its own way, and as they are while `seed` is None."""

    def __init__(self, enqueue: Enqueue) -> None:
        self._enqueue = enqueue
        self._draw: random.Random | None = None
        self._held: list[DueWork] = []
        self._lock = threading.Lock()

    def seed(self, seed: int | None) -> None:
        """Be unruly in the way of this seed, or not at all."""
        with self._lock:
            self._draw = None if seed is None else random.Random(seed)

    def __call__(self, work: DueWork) -> None:
        """Raises what `enqueue` raises."""
        for each in self._next(work):
            self._enqueue(each)

    def _next(self, work: DueWork) -> list[DueWork]:
        with self._lock:
            if self._draw is None:
                messages, self._held = [*self._held, work], []
                return messages
            messages = [*self._held, *[work] * self._draw.choice(_COPIES)]
            self._draw.shuffle(messages)
            now = [each for each in messages if self._draw.random() >= _HELD_BACK]
            self._held = [each for each in messages if each not in now]
            return now
