"""One attempt at a time of a schedule whose kind is not `job`: it runs in this process.

The row says running for as long as the attempt says that it lives. One that dies, or that meets an
error which may pass, is silent from then on, and another process begins the next when the lease is
over. What is wrong with the schedule itself fails at once.
"""

from __future__ import annotations

import _thread
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from specbatch.jobs.schedules.kinds import KINDS, Outcome
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.notifier import send
from specbatch.schemas.errors import (
    ObjectError,
    SpecbatchError,
    StoreError,
    UsageError,
    first_line,
)
from specbatch.schemas.notifications import Event, load_targets
from specbatch.schemas.schedules import RUN_LEASE_SEC, RunState, ScheduleRun
from specbatch.schemas.settings import Settings

log = logging.getLogger(__name__)

MOST_ATTEMPTS = 3  # at one time
SAID_SEC = RUN_LEASE_SEC / 4  # how often an attempt says that it lives


def utc(at: float) -> str:
    """`2026-03-29T01:00:00Z`."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A claimed time and what is to be done."""

    run: ScheduleRun
    kind: str
    options: Mapping[str, Any]  # checked ones
    notify: tuple[str, ...] = ()  # targets


def carry_out(settings: Settings, store: Store, attempt: Attempt) -> ScheduleRun:
    """Do it, and write how it ended. Returns the row as it was written.

    An interrupt gives the time back, for others to run. Raises `StoreError` when the end cannot be
    written: then the attempt counts as one that died.
    """
    run = attempt.run
    words = f"schedule {run.schedule}, {utc(run.logical_at)}"
    try:
        with _kept_alive(store, run):
            ended = _ended(settings, store, attempt)
    except KeyboardInterrupt:
        store.hold_schedule_run(replace(run, state=RunState.QUEUED))
        raise
    log.log(
        logging.WARNING if ended.state is not RunState.DONE else logging.INFO,
        "%s: %s: %s",
        *(words, ended.state, ended.reason),
    )
    if ended.state is not RunState.RUNNING:
        _notify(
            settings, attempt, ended
        )  # first: one that dies in between is told twice, not never
    store.hold_schedule_run(ended)
    return ended


def _ended(settings: Settings, store: Store, attempt: Attempt) -> ScheduleRun:
    run = attempt.run
    if run.attempts > MOST_ATTEMPTS:
        reason = f"given up: its process died in the last of {MOST_ATTEMPTS} attempts"
        return replace(run, state=RunState.FAILED, reason=reason)
    kind = KINDS[attempt.kind]
    try:
        options = kind.options.model_validate(attempt.options)
        found: Outcome = kind.run(options, settings, store, run.logical_at)
    except UsageError as error:
        return replace(run, state=RunState.FAILED, reason=str(error))
    except SpecbatchError as error:
        return _failed_for_now(run, str(error))
    except Exception as error:  # a bug in one kind must not stop the others
        log.exception("schedule %s", run.schedule)
        return _failed_for_now(run, f"{type(error).__name__}: {first_line(error)}")
    state = RunState.DONE if found.is_well else RunState.FAILED
    return replace(run, state=state, reason=found.summary, found=found.found)


def _failed_for_now(run: ScheduleRun, why: str) -> ScheduleRun:
    """The last attempt fails its time; after others it is tried again when the lease is over."""
    state = RunState.FAILED if run.attempts >= MOST_ATTEMPTS else RunState.RUNNING
    return replace(run, state=state, reason=f"attempt {run.attempts} of {MOST_ATTEMPTS}: {why}")


@contextmanager
def _kept_alive(store: Store, run: ScheduleRun) -> Iterator[None]:
    """Says that the attempt lives. It is interrupted once it is not its process's any more."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(SAID_SEC):
            try:
                if not store.hold_schedule_run(run):
                    log.warning("schedule %s: this attempt was replaced, and ends", run.schedule)
                    _thread.interrupt_main()
                    return
            except StoreError as error:  # it may be back before the lease is over
                log.warning("schedule %s: %s", run.schedule, error)

    thread = threading.Thread(target=renew, name="keep-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _notify(settings: Settings, attempt: Attempt, ended: ScheduleRun) -> None:
    """Tell the targets once each. One that does not answer is logged: the row says it, too."""
    if not attempt.notify:
        return
    event = Event.DONE if ended.state is RunState.DONE else Event.FAILED
    now = datetime.now(UTC)
    payload = {
        "id": f"{ended.schedule}-{utc(ended.logical_at)}",
        "type": f"schedule.{event.value}",
        "at": now.isoformat(timespec="milliseconds"),
        "name": ended.schedule,
        "kind": attempt.kind,
        "logical_time": utc(ended.logical_at),
        "reason": ended.reason,
    }
    try:
        targets = load_targets(settings.notify_file) if settings.notify_file else {}
    except UsageError as error:
        log.warning("schedule %s: nobody was told: %s", ended.schedule, error)
        return
    for name in attempt.notify:
        target = targets.get(name)
        if target is None:
            log.warning("schedule %s: there is no target %s to tell", ended.schedule, name)
        elif event in target.events:
            try:
                send(target, payload, now.timestamp())
            except ObjectError as error:
                log.warning("schedule %s: %s was not told: %s", ended.schedule, name, error)
            except Exception:  # the end is still to be written, or all is done once more
                log.exception("schedule %s: %s was not told", ended.schedule, name)
