"""Policies of other packages: entry points of `specbatch.policies`, each in a process of its own.

A thread that hangs cannot be ended; a process can. It gets a completion and returns a `Verdict`.
What else it does is a failure: raising, hanging, dying, or returning something else.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from specbatch.schemas.errors import RequestCancelledError, UsageError
from specbatch.schemas.policies import ENTRY_POINTS, PolicyInput, Ruling, Verdict

log = logging.getLogger(__name__)

Hook = Callable[..., Any]
MOST_BYTES = 16 << 20  # of a text that a policy returns
LOAD_SEC = 300.0  # it may have a model to load
_SPAWN = multiprocessing.get_context("spawn")


class HookFailedError(Exception):
    """The policy gave no verdict. The message never quotes the text."""


class _EndedError(HookFailedError):
    """Its process ended, perhaps by a signal that was meant for the worker."""


class HookProcess:
    """One entry point in its process, which is started when it is first asked and again after a
    failure that ended it. Safe to share between threads, which take turns.

    Raises `UsageError` if no installed package offers it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = _version(_found(name))
        self._turn = threading.Lock()
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._is_over = False

    def judge(self, given: PolicyInput, options: Mapping[str, Any], timeout_sec: float) -> Verdict:
        """Raises `HookFailedError`, and `RequestCancelledError` once the worker ends."""
        question = (given, dict(options))
        with self._turn:
            said = self._answered(question, timeout_sec)
        if not isinstance(said, Verdict):
            raise HookFailedError(said)
        return said

    def _answered(self, question: object, timeout_sec: float) -> Any:
        try:
            return self._exchange(self._started(), question, timeout_sec)
        except _EndedError:  # once may have been another's doing
            return self._exchange(self._started(), question, timeout_sec)

    def close(self) -> None:
        """End the process for good: who waits for an answer is told that the worker ends."""
        self._is_over = True
        if (process := self._process) is not None:
            process.kill()  # which wakes who waits, and ends that turn
        with self._turn:
            self._end()

    def _end(self) -> None:
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if pipe is not None:
            pipe.close()
        if process is not None:
            process.kill()
            process.join()

    def _started(self) -> Connection:
        if self._is_over:
            raise RequestCancelledError("the worker ends")
        if self._pipe is None:
            self._pipe, theirs = _SPAWN.Pipe()
            self._process = _SPAWN.Process(
                target=_serve, args=(self.name, theirs), name=f"policy {self.name}", daemon=True
            )
            self._process.start()
            theirs.close()
            said = self._exchange(self._pipe, None, LOAD_SEC)
            if said is not None:
                self._end()
                raise HookFailedError(said)
        return self._pipe

    def _exchange(self, pipe: Connection, question: object, timeout_sec: float) -> Any:
        try:
            pipe.send(question)
            if pipe.poll(timeout_sec):
                return pipe.recv()
        except (OSError, EOFError):
            self._end()
            raise _EndedError("its process ended") from None
        except BaseException:  # such as Ctrl-C: the next question would get this one's answer
            self._end()
            raise
        self._end()
        raise HookFailedError(f"it gave no answer in {timeout_sec:g} s")


@dataclass(slots=True)
class Hooks:
    """The entry points that this worker has been asked for, each in its process."""

    _by_name: dict[str, HookProcess] = field(default_factory=dict)

    def of(self, name: str) -> HookProcess:
        """Raises `UsageError` if no installed package offers it."""
        found = self._by_name.get(name)
        return found or self._by_name.setdefault(name, HookProcess(name))

    def close(self) -> None:
        for hook in self._by_name.values():
            hook.close()


def _found(name: str) -> EntryPoint:
    found = entry_points(group=ENTRY_POINTS, name=name)
    if not found:
        others = ", ".join(sorted(entry_points(group=ENTRY_POINTS).names)) or "none"
        raise UsageError(
            f"no installed package offers policy `{name}` (entry points of {ENTRY_POINTS} here: "
            f"{others}); install it on every verify worker"
        )
    return next(iter(found))


def _version(point: EntryPoint) -> str:
    of = point.dist
    return f"{of.name} {of.version}" if of is not None else "unknown"


# --- in the process ------------------------------------------------------------------------------
def _serve(name: str, pipe: Connection) -> None:
    """Answer until the other end is closed, or whoever started this is gone."""
    os.setsid()  # a terminal's Ctrl-C is for the worker alone
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with suppress(EOFError, OSError, KeyboardInterrupt):
        pipe.recv()
        hook = _load(name, pipe)
        while hook is not None:
            given, options = pipe.recv()
            pipe.send(_asked(hook, given, options))


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(0)


def _load(name: str, pipe: Connection) -> Hook | None:
    try:
        hook: Hook = _found(name).load()
    except Exception as error:
        pipe.send(f"it cannot be loaded: {type(error).__name__}")
        return None
    pipe.send(None)
    return hook


def _asked(hook: Hook, given: PolicyInput, options: Mapping[str, Any]) -> Verdict | str:
    """A verdict, or why there is none. An error's own words may quote the text."""
    try:
        said = hook(given, **options)
    except Exception as error:
        return f"it raised {type(error).__name__}"
    if not isinstance(said, Verdict):
        return f"it returned {type(said).__name__}, no Verdict"
    try:  # of plain types, so that reading it runs no code of the package
        text = None if said.text is None else str(said.text)
        if len((text or "").encode()) > MOST_BYTES:
            return f"it returned a text of more than {MOST_BYTES >> 20} MiB"
        return Verdict(Ruling(said.ruling), text, str(said.code))
    except ValueError as error:  # such as half a character
        return f"it returned a verdict that is none: {type(error).__name__}"
