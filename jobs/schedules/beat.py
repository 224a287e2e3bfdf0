"""Celery beat whose entries are the schedule files: it looks at each when a time has come.

Beat itself keeps nothing: what was done stands in the store, so it may be killed, and run twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from celery import Celery
from celery.beat import Scheduler, Service

from specbatch.jobs.schedules.definition import Folder
from specbatch.jobs.schedules.ticker import Ticker
from specbatch.schemas.errors import SpecbatchError

log = logging.getLogger(__name__)

LOOK_SEC = 5.0  # at least so often: files change, and runs that others wait for end


class Rounds:
    """Goes round the schedules of a folder."""

    def __init__(self, folder: Folder, ticker: Ticker, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._ticker = ticker
        self._clock = clock

    def go(self) -> float:
        """Look at all schedules; in how many seconds the next look is due.

        One that fails does not keep the others from their times.
        """
        wait = LOOK_SEC
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
            except Exception:  # a bug met by one schedule must not end the nights of all
                log.exception("schedule %s could not be checked", schedule.name)
            else:
                if following is not None:
                    wait = min(wait, max(following - self._clock(), 0.0))
        return wait


class ScheduleBeat(Scheduler):  # type: ignore[misc]  # celery publishes no types
    """Beat's scheduler: no entries of its own, a round instead of a tick."""

    def __init__(self, rounds: Rounds, *args: Any, **kwargs: Any) -> None:
        self._rounds = rounds
        super().__init__(*args, **kwargs)

    def setup_schedule(self) -> None:
        """There is nothing to set up: files and store say it all."""

    def tick(self, *_: Any, **__: Any) -> float:
        """A round; how long beat may sleep then."""
        return self._rounds.go()


def run_beat(
    app: Celery, folder: Folder, ticker: Ticker, clock: Callable[[], float] = time.time
) -> None:
    """Go round until SIGINT or SIGTERM. Interrupted amid a look, the next one goes on with it."""

    def scheduler(**kwargs: Any) -> ScheduleBeat:
        return ScheduleBeat(Rounds(folder, ticker, clock), **kwargs)

    Service(app, max_interval=LOOK_SEC, scheduler_cls=scheduler).start()
