"""Policies of other packages: entry points of `specbatch.policies`, each in a process of its own.

A thread that hangs cannot be ended; a process can (`hook_process.py`). It gets a completion and
returns a `Verdict`. What else it does is a failure: raising, hanging, dying, or returning something
else. It has the worker's environment, but neither its terminal nor its `__main__`.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from specbatch.pipeline.moderation import hook_process
from specbatch.pipeline.moderation.hook_process import entry_point
from specbatch.schemas.errors import RequestCancelledError
from specbatch.schemas.policies import PolicyInput, Verdict

LOAD_SEC = 300.0  # it may have a model to load


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
        of = entry_point(name).dist
        self.version = f"{of.name} {of.version}" if of is not None else "unknown"
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._is_over = False

    def judge(self, given: PolicyInput, options: Mapping[str, Any], timeout_sec: float) -> Verdict:
        """Raises `HookFailedError`, and `RequestCancelledError` once the worker ends."""
        question = (given, dict(options))
        with self._turn:
            try:
                said = self._asked(question, timeout_sec)
            except _EndedError:  # once may have been another's doing
                said = self._asked(question, timeout_sec)
        if not isinstance(said, Verdict):
            raise HookFailedError(said)
        return said

    def close(self) -> None:
        """End the process for good: who waits for an answer is told that the worker ends."""
        self._is_over = True
        if (process := self._process) is not None:
            process.kill()  # which wakes who waits, and ends that turn
        with self._turn:
            self._end()

    def _asked(self, question: object, timeout_sec: float) -> Any:
        if self._is_over:
            raise RequestCancelledError("the worker ends")
        pipe = self._started()
        try:
            pipe.send(question)
        except OSError:
            self._end()
            raise _EndedError("its process ended") from None
        return self._answer(pipe, timeout_sec)

    def _started(self) -> Connection:
        if self._pipe is None:
            self._pipe, theirs = multiprocessing.Pipe()
            with theirs:
                self._process = _start(self.name, theirs.fileno())
            said = self._answer(self._pipe, LOAD_SEC)
            if said is not None:
                self._end()
                raise HookFailedError(said)
        return self._pipe

    def _answer(self, pipe: Connection, timeout_sec: float) -> Any:
        try:
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

    def _end(self) -> None:
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if pipe is not None:
            pipe.close()
        if process is not None:
            process.kill()
            process.communicate()


def _start(name: str, descriptor: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", hook_process.__name__, name, str(descriptor)],
        stdin=subprocess.PIPE,  # ends with this process
        pass_fds=(descriptor,),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # a terminal's Ctrl-C is for the worker alone
    )


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
