"""Bells that are doubled, held back and rung in another order, as brokers may deliver them."""

from __future__ import annotations

import random
import threading

from specbatch.pipeline.runtime.client import Ring
from specbatch.schemas.records import Bell

_COPIES = (1, 1, 2, 3)
_HELD_BACK = 0.4  # of all bells, until others are rung; the last ones for ever


class UnrulyRing:
    """Passes bells on to `ring` in its own way, and as they are while `seed` is None."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._draw: random.Random | None = None
        self._held: list[Bell] = []
        self._lock = threading.Lock()

    def seed(self, seed: int | None) -> None:
        """Be unruly in the way of this seed, or not at all."""
        with self._lock:
            self._draw = None if seed is None else random.Random(seed)

    def __call__(self, bell: Bell) -> None:
        """Raises what the ring raises."""
        for each in self._next(bell):
            self._ring(each)

    def _next(self, bell: Bell) -> list[Bell]:
        with self._lock:
            if self._draw is None:
                bells, self._held = [*self._held, bell], []
                return bells
            bells = [*self._held, *[bell] * self._draw.choice(_COPIES)]
            self._draw.shuffle(bells)
            now = [each for each in bells if self._draw.random() >= _HELD_BACK]
            self._held = [each for each in bells if each not in now]
            return now
