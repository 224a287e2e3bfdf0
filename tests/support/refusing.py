"""A disk that refuses writes, for processes of their own. Needs no root."""

from __future__ import annotations

import subprocess
import tempfile
from functools import cache
from pathlib import Path

from support import forks
from support.local_runs import LocalRuns
from support.workers import WAIT_SEC

SOURCE = Path(__file__).with_name("refuse_writes.c")


class RefusingDisk:
    """Refuses, once it is told to, what goes to paths that contain a word."""

    def __init__(self, folder: Path) -> None:
        self._control = folder / "refuse"
        self.environment = {"LD_PRELOAD": library(), "REFUSE_WRITES": str(self._control)}

    def refuse(self, number: int, place: str, after: str = "") -> None:
        """Fail with the system's error `number`; `after`: once such a path was written to."""
        whole = self._control.with_suffix(".new")
        whole.write_text(f"{number} {place} {after}")
        whole.replace(self._control)

    def take(self) -> None:
        """Take all writes again."""
        self._control.unlink()

    @property
    def refusals(self) -> int:
        """How many writes were refused so far."""
        count = Path(f"{self._control}.count")
        return count.stat().st_size if count.exists() else 0


@cache
def library() -> str:
    """The path of what refuses, compiled once."""
    path = Path(tempfile.mkdtemp(prefix="specbatch-refusing-")) / "refuse_writes.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(path), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return str(path)


def run_on(
    disk: RefusingDisk, place: LocalRuns, *command: str, timeout: float = WAIT_SEC
) -> subprocess.CompletedProcess[str]:
    """A command to its end."""
    environment = place.environment | disk.environment
    return forks.run(*command, environment=environment, cwd=place.home, timeout=timeout)
