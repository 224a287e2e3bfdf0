"""What takes time inside a worker's process: its stages by kind, its engine's thread step by step.

Processor time, waiting for a core and waiting for anything else are told apart by the kernel's own
count (`schedstat`), so that a busy machine does not pass for a slow pipeline. Linux only.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbatch.pipeline.bootstrap import Worker
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.schemas.records import Stage

Parts = dict[str, float]
_THREADS = {
    "engine": "engine_thread_cpu_sec",
    "native": "native_threads_cpu_sec",
    "other": "other_threads_cpu_sec",
}


@dataclass(slots=True)
class StageTimes:
    """Times what the stages of this process do, each in the thread that does it."""

    spent: list[tuple[Stage, float, float, float]] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        run: Callable[..., None] = Worker.run

        def timed(worker: Worker, stage: Stage, *rest: Any) -> None:
            begun, computed = time.time(), time.thread_time()
            try:
                run(worker, stage, *rest)
            finally:
                self.spent.append((stage, begun, time.time(), time.thread_time() - computed))

        setattr(Worker, "run", timed)  # noqa: B010 - for this run only, behind the types' back
        try:
            yield
        finally:
            setattr(Worker, "run", run)  # noqa: B010 - the same

    def parts(self, begun: float, ended: float) -> Parts:
        """Processor seconds by stage, and the times before and after all verifying."""
        found: Parts = {}
        for stage, _, _, computed in self.spent:
            found[f"{stage}_cpu_sec"] = found.get(f"{stage}_cpu_sec", 0.0) + computed
        verifying = [(b, e) for stage, b, e, _ in self.spent if stage is Stage.VERIFY]
        if verifying:
            found["before_first_group_sec"] = min(b for b, _ in verifying) - begun
            found["after_last_group_sec"] = ended - max(e for _, e in verifying)
        return found


@dataclass(slots=True)
class StepTimes:
    """Where the engine's thread was during its steps.

    `steps_sec` is `steps_cpu_sec`, the time in which it could have run and had no core
    (`steps_without_core_sec`), and the time in which it waited for something else
    (`steps_blocked_sec`): the interpreter's lock, in this process.
    """

    count: int = 0
    seconds: float = 0.0
    cpu_sec: float = 0.0
    without_core_sec: float = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """All engines' steps are timed meanwhile."""
        step = Engine.step
        schedstat = threading.local()

        def timed(engine: Engine) -> Any:
            if not hasattr(schedstat, "file"):
                path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
                schedstat.file = os.open(path, os.O_RDONLY)
            begun, before = time.perf_counter(), _on_core_and_ready(schedstat.file)
            try:
                return step(engine)
            finally:
                after = _on_core_and_ready(schedstat.file)
                self.seconds += time.perf_counter() - begun
                self.cpu_sec += after[0] - before[0]
                self.without_core_sec += after[1] - before[1]
                self.count += 1

        setattr(Engine, "step", timed)  # noqa: B010 - for this run only, behind the types' back
        try:
            yield
        finally:
            setattr(Engine, "step", step)  # noqa: B010 - the same

    def read(self) -> Parts:
        return {
            "steps": self.count,
            "steps_sec": self.seconds,
            "steps_cpu_sec": self.cpu_sec,
            "steps_without_core_sec": self.without_core_sec,
            "steps_blocked_sec": self.seconds - self.cpu_sec - self.without_core_sec,
        }


def _on_core_and_ready(file: int) -> tuple[float, float]:
    """Seconds that the thread has run, and those it waited for a core."""
    on_core, ready, _ = os.pread(file, 64, 0).split()
    return int(on_core) / 1e9, int(ready) / 1e9


def threads_cpu_sec() -> Parts:
    """Processor time of this process's threads: the engine's, its native helpers', all others'."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = dict.fromkeys(_THREADS.values(), 0.0)
    for task in Path("/proc/self/task").iterdir():
        try:
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:  # it has just ended
            continue
        name = names.get(int(task.name))
        kind = "native" if name is None else "engine" if name.startswith("engine") else "other"
        found[_THREADS[kind]] += seconds
    return found
