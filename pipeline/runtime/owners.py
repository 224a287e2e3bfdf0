"""Names of processes that hold leases: the machine and the process id."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_PROC = Path("/proc")


def owner_here() -> str:
    """The name under which this process claims."""
    return f"{socket.gethostname()}:{os.getpid()}"


def is_dead_here(owner: str) -> bool:
    """Whether it names a process of this machine that has ended.

    Containers may share a machine's name and not its processes. A lease that is taken from a live
    process by mistake costs its work, and nothing else: its fencing token is no longer current.
    """
    machine, _, number = owner.rpartition(":")
    if machine != socket.gethostname() or not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it is another user's
        return False
    return _is_zombie(int(number))


def _is_zombie(pid: int) -> bool:
    """Whether it has ended and its parent has not asked how."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "Z"
