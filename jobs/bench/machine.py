"""The machine of the measurements, and whether others kept it busy meanwhile."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Its processor, threads and versions, and the date; not its name."""
    import transformers

    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


class Idling:
    """Whether processes stay idle while others are timed, by their processor time.

    They are this process, and the peers of a run by name.
    """

    def __init__(self, peers: Callable[[], Mapping[str, int]]) -> None:
        self.peers = peers
        self._elapsed: dict[str, float] = defaultdict(float)
        self._burned: dict[str, float] = defaultdict(float)

    @contextmanager
    def during(self, name: str, label: str) -> Iterator[None]:
        """Measure during a run in that peer's process, or in this one. `label` names the run."""
        peers = self.peers()
        others = {pid for peer, pid in peers.items() if peer != name}
        if name in peers:
            others.add(os.getpid())
        begun, before = time.perf_counter(), sum(map(cpu_seconds, others))
        yield
        self._burned[label] += max(sum(map(cpu_seconds, others)) - before, 0.0)
        self._elapsed[label] += time.perf_counter() - begun

    def cores(self, label: str) -> float | None:
        """Average number of cores that all others kept busy during these runs; None: no run."""
        if not self._elapsed[label]:
            return None
        return round(self._burned[label] / self._elapsed[label], 4)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process's threads, to the nanosecond."""
    found = 0
    with suppress(OSError):  # the process ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += int((thread / "schedstat").read_text().split()[0])
    return found / 1e9
