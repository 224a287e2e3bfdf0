"""The process of one policy of another package: `python -m … NAME DESCRIPTOR`.

It answers questions that come by a pipe, and ends when its standard input does: with who started
it, whatever the policy is doing then.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from multiprocessing.connection import Connection
from typing import Any

from specbatch.schemas.errors import UsageError
from specbatch.schemas.policies import ENTRY_POINTS, PolicyInput, Ruling, Verdict

Hook = Callable[..., Any]
MOST_BYTES = 16 << 20  # of a text that a policy returns


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
    name, descriptor = sys.argv[1:]
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    pipe = Connection(int(descriptor))
    with suppress(EOFError, OSError, KeyboardInterrupt):
        hook = _load(name, pipe)
        while hook is not None:
            given, options = pipe.recv()
            pipe.send(_asked(hook, given, options))


def _end_with_stdin() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)


def _load(name: str, pipe: Connection) -> Hook | None:
    try:
        hook: Hook = entry_point(name).load()
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
        if "\0" in (text or ""):
            raise ValueError("no database stores this character in a text")
        return Verdict(Ruling(said.ruling), text, str(said.code))
    except ValueError as error:  # such as half a character
        return f"it returned an invalid verdict: {type(error).__name__}"


if __name__ == "__main__":
    main()
