"""Memory and processor time of a process and of all that it has started, while it runs."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from support.tree import ROOT

_WAIT_SEC = 60.0

EVERY_SEC = 0.02
_PAGE_MIB = 4096 / (1 << 20)
_TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")


def told_peaks(script: Path, rows: int) -> list[int]:
    """What a script prints that works on a quarter of the rows and on all: its peaks in MiB."""
    done = subprocess.run(
        [sys.executable, script, str(rows)],
        env=os.environ | {"PYTHONPATH": f"{ROOT / '.typing'}:{ROOT / 'tests'}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


class PeakMemory:
    """The most that this process tree has of its own, in MiB; shared pages are not counted. And
    the processor time that it has used, as far as it was seen."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.first_mib = _tree_mib(pid)
        self.peak_mib = self.first_mib
        self.computed_sec = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def end(self) -> float:
        self._ended.set()
        self._thread.join()
        return self.peak_mib

    def _look(self) -> None:
        while not self._ended.wait(EVERY_SEC):
            self.peak_mib = max(self.peak_mib, _tree_mib(self._pid))
            self.computed_sec = max(self.computed_sec, _tree_sec(self._pid))


def _tree_mib(pid: int) -> float:
    return _own_mib(pid) + sum(_tree_mib(child) for child in children(pid))


def _tree_sec(pid: int) -> float:
    return _own_sec(pid) + sum(_tree_sec(child) for child in children(pid))


def _own_sec(pid: int) -> float:
    """With that of children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_SEC


def _own_mib(pid: int) -> float:
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (OSError, ValueError):
        return 0.0
    return (int(resident) - int(shared)) * _PAGE_MIB


def ended(pid: int) -> Callable[[], bool]:
    """Asks later whether that very process has ended, and waits for it for a while."""
    file = os.pidfd_open(pid)

    def has_ended() -> bool:
        ready = select.select([file], [], [], _WAIT_SEC)[0]
        os.close(file)
        return bool(ready)

    return has_ended


def below(pid: int) -> set[int]:
    """All processes that it has started, and those that they have, but not the servers of the
    tests: PostgreSQL and Redis start processes of their own whenever they like."""
    own = {child for child in children(pid) if not _is_server(child)}
    return own.union(*(below(child) for child in own))


def _is_server(pid: int) -> bool:
    try:
        name = Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return False
    return name.startswith(("postgres", "redis-server"))


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("[0-9]*/children"):
        try:
            found += map(int, task.read_text().split())
        except OSError:
            continue
    return found
