"""Runs Celery beat with schedule files as its entries, and checks each when a time has come.

Beat itself keeps no state: the store records every run, so beat may be killed, or run twice.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery import Celery
from celery.beat import Scheduler, Service

from specbatch.jobs.schedules.definition import Folder
from specbatch.jobs.schedules.ticker import Ticker
from specbatch.schemas.errors import SpecbatchError

log = logging.getLogger(__name__)

POLL_SEC = 5.0  # the longest pause: files change, and runs end that others wait for


class Rounds:
    """Checks all schedules of a folder, again and again."""

    def __init__(self, folder: Folder, ticker: Ticker, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._ticker = ticker
        self._clock = clock

    def go(self) -> float:
        """Check all schedules once. Returns the seconds until the next check.

        A schedule that fails does not delay the others.
        """
        wait = POLL_SEC
        try:
            schedules = self._folder.schedules()
        except SpecbatchError as error:
            log.error("%s", error)
            return wait
        for schedule in schedules:
            try:
                self._ticker.tick(schedule)
                following = self._ticker.next_time(schedule)
            except SpecbatchError as error:
                log.error("schedule %s: %s", schedule.name, error)
            except Exception:  # a bug in one schedule must not stop the others
                log.exception("schedule %s could not be checked", schedule.name)
            else:
                if following is not None:
                    wait = min(wait, max(following - self._clock(), 0.0))
        return wait


class ScheduleBeat(Scheduler):  # type: ignore[misc]  # celery publishes no types
    """Beat's scheduler, without entries of its own: each tick is a round."""

    def __init__(self, rounds: Rounds, *args: Any, **kwargs: Any) -> None:
        self._rounds = rounds
        super().__init__(*args, **kwargs)

    def setup_schedule(self) -> None:
        """Nothing to set up: files and the store hold all state."""

    def tick(self, *_: Any, **__: Any) -> float:
        """Do a round. Returns how long beat may sleep."""
        return self._rounds.go()


def run_beat(
    app: Celery, folder: Folder, ticker: Ticker, clock: Callable[[], float] = time.time
) -> None:
    """Run until SIGINT or SIGTERM. The next process continues an interrupted check."""

    def scheduler(**kwargs: Any) -> ScheduleBeat:
        return ScheduleBeat(Rounds(folder, ticker, clock), **kwargs)

    service = Service(app, max_interval=POLL_SEC, scheduler_cls=scheduler)

    def end(*_: object) -> None:
        service.stop()  # after the round, where the interrupt is lost: in a finaliser, say
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    with suppress(KeyboardInterrupt):
        service.start()
