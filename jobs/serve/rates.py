"""How many requests an API key may send in a time. Each key has its own count, and so has each
address that tries to sign in."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from specbatch.jobs.serve.errors import ApiError
from specbatch.schemas.errors import UsageError

OFF = "off"
MOST_COUNTS = 10_000  # before those that are full again are forgotten
_SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0}
_FORM = re.compile(rf"([1-9]\d{{0,8}})/({'|'.join(_SECONDS)})")


@dataclass(frozen=True, slots=True)
class Rate:
    """So many requests in so many seconds, all of them at once if need be."""

    requests: int
    seconds: float

    @property
    def interval(self) -> float:
        """Seconds in which one more is allowed."""
        return self.seconds / self.requests


def rate_of(text: str) -> Rate | None:
    """`600/minute`; None for `off`. Raises `UsageError`."""
    if text == OFF:
        return None
    found = _FORM.fullmatch(text)
    if found is None:
        raise UsageError(f"--rate {text!r} is no rate: write 600/minute, per {_units()}, or off")
    return Rate(int(found[1]), _SECONDS[found[2]])


def _units() -> str:
    *first, last = _SECONDS
    return f"{', '.join(first)} or {last}"


class Rates:
    """The counts of all keys: a token bucket for each, written as the one time at which it is full
    again (the generic cell rate algorithm of ATM). Thread-safe; a restart begins anew."""

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self._clock = clock
        self._full_at: dict[str, float] = {}
        self._most = MOST_COUNTS
        self._lock = threading.Lock()

    def wait_sec(self, key_id: str) -> float:
        """Count a request. 0: it may pass; else the seconds until one may, and none is counted."""
        with self._lock:
            now = self._clock()
            full_at = max(self._full_at.get(key_id, now), now) + self.rate.interval
            wait = full_at - now - self.rate.seconds
            if wait > 1e-9 * self.rate.seconds:  # sums of intervals are not exact
                return wait
            self._full_at[key_id] = full_at
            self._forget(now)
            return 0.0

    def check(self, key_id: str) -> None:
        """Count a request. Raises `ApiError`, which says when to come back."""
        if wait := self.wait_sec(key_id):
            raise ApiError(
                429,
                f"no more than {self.rate.requests} requests in {self.rate.seconds:g} s may be "
                "sent: wait as long as `Retry-After` says",
                "rate_limit_exceeded",
                retry_after=math.ceil(wait),
            )

    def _forget(self, now: float) -> None:
        """Drop counts that are as good as none, once there are many."""
        if len(self._full_at) > self._most:
            self._full_at = {key: at for key, at in self._full_at.items() if at > now}
            self._most = max(MOST_COUNTS, 2 * len(self._full_at))
