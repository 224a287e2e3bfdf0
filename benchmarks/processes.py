"""What processes take, read from /proc: processor time and resident memory. Linux only."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_sec(pid: int) -> float:
    """Processor time of a process, of those below it, and of those they have waited for."""
    found = 0.0
    for one in family(pid):
        try:
            fields = _stat(one)
        except OSError:  # it has just ended; its parent has its time, or will
            continue
        found += sum(map(int, fields[11:15])) / _TICKS  # utime, stime, and those of dead children
    return found


def resident_bytes(pid: int) -> int:
    """Resident memory of a process that is there."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def own_bytes(pid: int) -> int:
    """Memory of a process and those below it that they do not share with others' (PSS)."""
    found = 0
    for one in family(pid):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        found += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return found


def family(pid: int) -> list[int]:
    """The process and all below it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
            except OSError:
                continue
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(one)
        todo += parents.get(one, [])
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may hold anything; the state is first."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
