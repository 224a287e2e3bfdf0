"""The process of one policy of another package: `python -m … NAME DESCRIPTOR`.

It answers questions that come by a pipe, JSON both ways, each answer with the number of its
question. A second process, in which none of the policy's code runs, ends both when standard input
ends: with who started them, whatever the policy is doing then.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from multiprocessing.connection import Connection
from typing import Any

from specbatch.schemas.errors import UsageError
from specbatch.schemas.policies import ENTRY_POINTS, PolicyInput, Verdict

Hook = Callable[..., Any]


def entry_point(name: str) -> EntryPoint:
    """Raises `UsageError` if no installed package offers it."""
    found = entry_points(group=ENTRY_POINTS, name=name)
    if not found:
        others = ", ".join(sorted(entry_points(group=ENTRY_POINTS).names)) or "none"
        raise UsageError(
            f"no installed package offers policy `{name}` (entry points of {ENTRY_POINTS} here: "
            f"{others}); install it on every verify worker"
        )
    return next(iter(found))


def main() -> None:
    name, descriptor = sys.argv[1], int(sys.argv[2])
    if child := os.fork():
        os.close(descriptor)
        _guard(child)
    pipe, own = Connection(descriptor), os.getpid()
    with suppress(EOFError, OSError):
        hook = _load(name, pipe)
        while hook is not None:
            question = json.loads(pipe.recv_bytes())
            answer = {"number": question["number"], **_asked(hook, question)}
            if os.getpid() != own:  # the policy has forked, and came back in both
                os._exit(1)
            pipe.send_bytes(json.dumps(answer).encode())


def _guard(child: int) -> None:
    """Wait for the end of the child or of standard input, and end both."""
    ended = os.pidfd_open(child)
    select.select([0, ended], [], [])
    os.killpg(0, signal.SIGKILL)


def _load(name: str, pipe: Connection) -> Hook | None:
    try:
        hook: Hook = entry_point(name).load()
    except BaseException as error:
        pipe.send_bytes(json.dumps({"failed": f"it cannot be loaded: {_kind(error)}"}).encode())
        return None
    pipe.send_bytes(b"{}")
    return hook


def _asked(hook: Hook, question: dict[str, Any]) -> dict[str, Any]:
    """A verdict, or why there is none. An error's own words may quote the text."""
    try:
        said = hook(PolicyInput(**question["given"]), **question["options"])
    except BaseException as error:
        return {"failed": f"it raised {_kind(error)}"}
    if not isinstance(said, Verdict):
        return {"failed": f"it returned {type(said).__name__}, no Verdict"}
    return {"ruling": said.ruling, "text": said.text, "code": said.code}


def _kind(error: BaseException) -> str:
    return type(error).__name__


if __name__ == "__main__":
    main()
