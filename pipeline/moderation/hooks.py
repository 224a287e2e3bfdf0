"""Policies and scorers of other packages: entry points, each in a process of its own.

A thread that hangs cannot be ended; a process can (`hook_process.py`). It gets a completion and
returns a `Verdict`, or a score. What else it does is a failure: raising, hanging, dying, or
returning something else. It has the worker's environment, but neither its terminal nor its
`__main__`.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from specbatch.pipeline.moderation import hook_process
from specbatch.pipeline.moderation.hook_process import POLICY, Kind, entry_point
from specbatch.schemas.errors import RequestCancelledError, UsageError
from specbatch.schemas.policies import PolicyInput, Ruling, Verdict

MOST_BYTES = 32 << 20  # of an answer
LOAD_SEC = 300.0  # it may have a model to load


class HookFailedError(Exception):
    """The entry point gave no answer. The message never quotes the text."""


class _EndedError(HookFailedError):
    """Its process ended, perhaps by a signal that was meant for the worker."""


class HookProcess:
    """One entry point in its process, which is started when it is first asked and again after a
    failure that ended it. Safe to share between threads, which take turns.

    Raises `UsageError` if no installed package offers it.
    """

    def __init__(self, name: str, kind: Kind = POLICY) -> None:
        self.name = name
        self.kind = kind
        of = entry_point(kind, name).dist
        self.version = f"{of.name} {of.version}" if of is not None else "unknown"
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._asked = 0
        self._is_over = False

    def judge(self, given: PolicyInput, options: Mapping[str, Any], timeout_sec: float) -> Verdict:
        """What a policy says. Raises `HookFailedError`, and `RequestCancelledError` once the worker
        ends."""
        return _verdict(self._said(given, options, timeout_sec))

    def score(self, given: PolicyInput, options: Mapping[str, Any], timeout_sec: float) -> float:
        """What a scorer says, a finite number. Raises as `judge` does."""
        return _score(self._said(given, options, timeout_sec))

    def _said(
        self, given: PolicyInput, options: Mapping[str, Any], timeout_sec: float
    ) -> dict[str, Any]:
        with self._turn:
            try:
                answer = self._answer(given, options, timeout_sec)
            except _EndedError:  # once may have been another's doing
                answer = self._answer(given, options, timeout_sec)
        if "failed" in answer:
            raise HookFailedError(answer["failed"])
        return answer

    def load(self) -> None:
        """Start the process, if none runs. Raises `UsageError` where it cannot be loaded."""
        with self._turn:
            try:
                self._start()
            except HookFailedError as error:
                raise UsageError(
                    f"{self.kind.name} `{self.name}` of {self.version} cannot be used: {error}; "
                    "mend or install it on every verify worker, then retry the job"
                ) from None

    def close(self) -> None:
        """End the process for good: who waits for an answer is told that the worker ends."""
        self._is_over = True
        if (process := self._process) is not None:
            _end_now(process, self._pipe)  # which wakes who waits, and ends that turn
        with self._turn:
            self._end()

    def _answer(
        self, given: PolicyInput, options: Mapping[str, Any], timeout_sec: float
    ) -> dict[str, Any]:
        if self._is_over:
            raise RequestCancelledError("the worker ends")
        self._start()
        self._asked += 1
        question = {"number": self._asked, "given": asdict(given), "options": dict(options)}
        answer = self._exchange(json.dumps(question).encode(), timeout_sec)
        if answer.get("number") != self._asked:  # of a copy that it has made of itself
            self._end()
            raise HookFailedError("it gave an answer to another question")
        return answer

    def _start(self) -> None:
        if self._process is not None:
            return
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = _started(self.kind, self.name, theirs.fileno())
        said = self._exchange(None, LOAD_SEC)
        if "failed" in said:
            self._end()
            raise HookFailedError(said["failed"])

    def _exchange(self, question: bytes | None, timeout_sec: float) -> dict[str, Any]:
        """Both ways within the time: a process that does not read is ended, too."""
        assert self._pipe is not None
        assert self._process is not None
        late = threading.Event()
        ends = (late, self._process, self._pipe)
        timer = threading.Timer(timeout_sec, _end_late, ends)
        timer.daemon = True
        timer.start()
        try:
            if question is not None:
                self._pipe.send_bytes(question)
            answer: dict[str, Any] = json.loads(self._pipe.recv_bytes(MOST_BYTES))
        except (OSError, EOFError, ValueError):
            self._end()
            if late.is_set():
                raise HookFailedError(f"it gave no answer in {timeout_sec:g} s") from None
            raise _EndedError("its process ended, or its answer is too long") from None
        except BaseException:  # such as Ctrl-C: the next question would get this one's answer
            self._end()
            raise
        finally:
            timer.cancel()
        return answer

    def _end(self) -> None:
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if process is not None:
            _kill(process)
            process.communicate()
        if pipe is not None:
            pipe.close()


def _started(kind: Kind, name: str, descriptor: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", hook_process.__name__, kind.name, name, str(descriptor)],
        stdin=subprocess.PIPE,  # ends with this process
        stdout=subprocess.DEVNULL,  # it may print texts, and this process's output is not its own
        stderr=subprocess.DEVNULL,
        pass_fds=(descriptor,),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # a terminal's Ctrl-C is for the worker alone
    )


def _end_late(
    late: threading.Event, process: subprocess.Popen[bytes], pipe: Connection | None
) -> None:
    late.set()
    _end_now(process, pipe)


def _end_now(process: subprocess.Popen[bytes], pipe: Connection | None) -> None:
    """End it, and the waiting for it: what it forked into another session keeps the other end."""
    _kill(process)
    if pipe is None:
        return
    with suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """It and what it has forked."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _verdict(answer: Mapping[str, Any]) -> Verdict:
    """Raises `HookFailedError`, without a word of what came."""
    ruling, text, code = (answer.get(name) for name in ("ruling", "text", "code"))
    try:
        if text is not None:
            text.encode()
        if "\0" in (text or ""):
            raise ValueError("no database stores this character in a text")
        return Verdict(Ruling(str(ruling)), text, code or "")
    except (ValueError, TypeError, AttributeError) as error:
        raise HookFailedError(f"its verdict is invalid: {type(error).__name__}") from None


def _score(answer: Mapping[str, Any]) -> float:
    """Raises `HookFailedError`, without a word of what came."""
    score = answer.get("score")
    if not isinstance(score, float) or not math.isfinite(score):
        raise HookFailedError("its score is invalid")
    return score


@dataclass(slots=True)
class Hooks:
    """The entry points that this worker has been asked for, each in its process."""

    _by_name: dict[tuple[str, str], HookProcess] = field(default_factory=dict)

    def of(self, name: str, kind: Kind = POLICY) -> HookProcess:
        """Raises `UsageError` if no installed package offers it."""
        key = (kind.name, name)
        found = self._by_name.get(key)
        return found or self._by_name.setdefault(key, HookProcess(name, kind))

    def close(self) -> None:
        for hook in self._by_name.values():
            hook.close()
