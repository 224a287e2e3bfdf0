"""Carries out disturbances inside the worker process that they hit."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

from specbatch.jobs.chaos.orders import NOTHING, Arming
from specbatch.jobs.chaos.plan import Deed, Disturbance
from specbatch.schemas.crash_points import CrashPoint
from specbatch.schemas.errors import DeviceLostError, EngineError, ObjectError, StoreError

_WRITING = (
    *(CrashPoint.ARTEFACT_WRITE, CrashPoint.DRAFT_WRITE, CrashPoint.SQL_COMMIT),
    *(CrashPoint.UPLOAD, CrashPoint.MANIFEST),
)


class Armed:
    """Called at every crash point of this process. Fires due disturbances. Thread-safe."""

    def __init__(self, number: int, on_postgres: bool, on_fire: Callable[[int, int], None]) -> None:
        """`number`: of this worker. `on_fire(run, index)` is called before a disturbance fires."""
        self._number = number
        self._on_postgres = on_postgres
        self._on_fire = on_fire
        self._arming = NOTHING
        self._open: dict[int, Disturbance] = {}
        self._lock = threading.Lock()

    def arm(self, arming: Arming) -> None:
        """Replace all earlier disturbances with these."""
        mine = (None, self._number)
        with self._lock:
            self._arming = arming
            self._open = {i: d for i, d in enumerate(arming.disturbances) if d.worker in mine}

    def __call__(self, point: CrashPoint) -> None:
        with self._lock:  # else it might die between another thread's count and its report
            for disturbance in self._due(point):
                strike(disturbance, self._on_postgres)
            full = self._arming.full
        if full and point in _WRITING and Path(full).exists():
            raise full_at(point, self._on_postgres)

    def _due(self, point: CrashPoint) -> list[Disturbance]:
        due = []
        if self._open:
            arming = self._arming
            for index, disturbance in list(self._open.items()):
                if disturbance.point is not point:
                    continue
                place = count(Path(arming.counts) / f"{arming.run}-{index}")
                if place >= disturbance.nth:
                    del self._open[index]
                if place == disturbance.nth:
                    self._on_fire(arming.run, index)
                    due.append(disturbance)
        return due


def count(folder: Path) -> int:
    """Count one more over all processes. Each number is returned once."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        try:
            (folder / str(number)).open("xb").close()
        except FileExistsError:
            continue
        return number
    raise AssertionError("numbers do not end")


def strike(disturbance: Disturbance, on_postgres: bool) -> None:
    """Do the deed to this process now. BREAK raises."""
    match disturbance.deed:
        case Deed.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Deed.FREEZE:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Deed.BREAK:
            errors = errors_at(disturbance.point, on_postgres)
            raise errors[disturbance.variant % len(errors)]


def full_at(point: CrashPoint, on_postgres: bool) -> Exception:
    """The error of a full disk at a place that writes."""
    if point is CrashPoint.SQL_COMMIT:
        return _database_errors(on_postgres)[1]
    return _disk_full()


def errors_at(point: CrashPoint, on_postgres: bool) -> tuple[Exception, ...]:
    """The errors that disk, link, device or database raise at such a place."""
    match point:
        case CrashPoint.LEASE:
            return StoreError("the database did not answer in time"), RuntimeError("a bug")
        case CrashPoint.ARTEFACT_WRITE | CrashPoint.DRAFT_WRITE:
            return _disk_full(), ObjectError("cannot write: the S3 store answered 503")
        case CrashPoint.UPLOAD | CrashPoint.MANIFEST:
            return _disk_full(), ObjectError("it did not arrive whole; it was deleted, try again")
        case CrashPoint.SUBMIT:
            return (EngineError("the engine did not finish in time"),)
        case CrashPoint.VERIFY:
            return RuntimeError("a pass failed"), DeviceLostError("the device fell off the bus")
        case CrashPoint.SQL_COMMIT | CrashPoint.COMMITTED:
            return _database_errors(on_postgres)
        case CrashPoint.ACK:
            return (ConnectionResetError(errno.ECONNRESET, "the broker hung up"),)


def _disk_full() -> ObjectError:
    """The error of a full disk, as object stores raise it."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    error = ObjectError(f"cannot write: {os.strerror(errno.ENOSPC).lower()}")
    error.__cause__ = full
    return error


def _database_errors(on_postgres: bool) -> tuple[Exception, ...]:
    """An error that lets a transaction retry, and one that does not."""
    if on_postgres:
        import psycopg

        broken = psycopg.OperationalError("server closed the connection unexpectedly")
        return broken, psycopg.errors.DiskFull("could not extend file: no space left on device")
    return (
        _sqlite_error("database is locked", sqlite3.SQLITE_BUSY),
        _sqlite_error("database or disk is full", sqlite3.SQLITE_FULL),
    )


def _sqlite_error(words: str, code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(words)
    error.sqlite_errorcode = code
    return error
