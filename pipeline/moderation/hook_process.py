"""The process of one entry point of another package: `python -m … KIND NAME DESCRIPTOR`.

It answers questions that come by a pipe, JSON both ways, each answer with the number of its
question. A second process, in which none of the package's code runs, ends both when standard input
ends: with who started them, whatever the entry point is doing then.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

from specbatch.schemas.best_by import SCORERS
from specbatch.schemas.errors import UsageError
from specbatch.schemas.policies import ENTRY_POINTS, PolicyInput, Verdict

Hook = Callable[..., Any]
_PR_SET_PDEATHSIG = 1  # of `prctl(2)`
Answer = dict[str, Any]  # as JSON


def _verdict(said: Any) -> Answer:
    if not isinstance(said, Verdict):
        return {"failed": f"it returned {_type_of(said)}, no Verdict"}
    return {"ruling": said.ruling, "text": said.text, "code": said.code}


def _score(said: Any) -> Answer:
    if isinstance(said, bool) or not isinstance(said, Real):
        return {"failed": f"it returned {_type_of(said)}, no number"}
    score = float(said)
    return {"score": score} if math.isfinite(score) else {"failed": "its number is not finite"}


@dataclass(frozen=True, slots=True)
class Kind:
    """What packages offer in one group of entry points."""

    name: str  # in errors and logs
    group: str
    answer: Callable[[Any], Answer]  # of what the entry point returned


POLICY = Kind("policy", ENTRY_POINTS, _verdict)
SCORER = Kind("scorer", SCORERS, _score)


def entry_point(kind: Kind, name: str) -> EntryPoint:
    """Raises `UsageError` if no installed package offers it."""
    found = entry_points(group=kind.group, name=name)
    if not found:
        others = ", ".join(sorted(entry_points(group=kind.group).names)) or "none"
        raise UsageError(
            f"no installed package offers {kind.name} `{name}` (entry points of {kind.group} here: "
            f"{others}); install it on every verify worker"
        )
    return next(iter(found))


def main() -> None:
    kind = {kind.name: kind for kind in (POLICY, SCORER)}[sys.argv[1]]
    name, descriptor = sys.argv[2], int(sys.argv[3])
    guard = os.getpid()
    if child := os.fork():
        os.close(descriptor)
        _guard(child)
    _end_with(guard)
    pipe, own = Connection(descriptor), os.getpid()
    with suppress(EOFError, OSError):
        hook = _load(kind, name, pipe)
        while hook is not None:
            question = json.loads(pipe.recv_bytes())
            answer = {"number": question["number"], **_asked(kind, hook, question)}
            if os.getpid() != own:  # it has forked, and came back in both
                os._exit(1)
            pipe.send_bytes(json.dumps(answer).encode())


def _end_with(guard: int) -> None:
    """Even if the entry point moves to another session, where no signal to the group finds it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # it ended before
        os._exit(1)


def _guard(child: int) -> None:
    """Wait for the end of the child or of standard input, and end both."""
    ended = os.pidfd_open(child)
    select.select([0, ended], [], [])
    os.killpg(0, signal.SIGKILL)


def _load(kind: Kind, name: str, pipe: Connection) -> Hook | None:
    try:
        hook: Hook = entry_point(kind, name).load()
    except BaseException as error:
        pipe.send_bytes(json.dumps({"failed": f"it cannot be loaded: {_type_of(error)}"}).encode())
        return None
    pipe.send_bytes(b"{}")
    return hook


def _asked(kind: Kind, hook: Hook, question: dict[str, Any]) -> Answer:
    """An answer, or why there is none. An error's own words may quote the text."""
    try:
        return kind.answer(hook(PolicyInput(**question["given"]), **question["options"]))
    except BaseException as error:
        return {"failed": f"it raised {_type_of(error)}"}


def _type_of(value: object) -> str:
    return type(value).__name__


if __name__ == "__main__":
    main()
