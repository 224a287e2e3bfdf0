"""Asks a store again while it fails, for a limited time."""

from __future__ import annotations

from collections.abc import Callable

import tenacity


class Patience:
    """Limits how long failures of one operation may take in all. Success has no limit.

    An upload of many parts has one limit, so that a failure per part does not add up to hours.
    """

    def __init__(self, seconds: float):
        self._left = seconds
        self._noted = 0.0  # of the request that is being retried: seconds up to its last failure

    def is_used_up(self, state: tenacity.RetryCallState) -> bool:
        """Whether to give up after a failure rather than wait and try again."""
        return self._since(state) + state.upcoming_sleep >= self._left

    def note(self, state: tenacity.RetryCallState) -> None:
        """Subtract the time of this failure and of the wait that follows it."""
        since = self._since(state) + state.upcoming_sleep
        self._left -= since
        self._noted += since

    def _since(self, state: tenacity.RetryCallState) -> float:
        if state.attempt_number == 1:
            self._noted = 0.0
        return max(0.0, (state.seconds_since_start or 0.0) - self._noted)


def retrying(
    is_transient: Callable[[BaseException], bool], patience: Patience
) -> tenacity.Retrying:
    """Calls a request until it succeeds, fails for good, or the patience is used up."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        stop=patience.is_used_up,
        before_sleep=patience.note,
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=10.0),
        reraise=True,
    )
