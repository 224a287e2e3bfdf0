"""Processes that share a port: real ones, killed and replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specbatch.pipeline.observe.metrics import metric_names as names
from specbatch.pipeline.observe.metrics.endpoint import MetricsEndpoint
from specbatch.pipeline.observe.metrics.folder import PAST, MetricsFolder
from specbatch.pipeline.observe.metrics.metrics import Metrics, Snapshot, merged
from specbatch.schemas.errors import UsageError
from support.scraping import scrape
from support.servers import free_port
from support.workers import wait_until

# Counts as many sweeps as each line says, and says when the others may know of it.
PROCESS = """
import sys
from pathlib import Path
from specbatch.pipeline.observe import metric_names as names, metrics_endpoint
from specbatch.pipeline.observe.metrics.metrics import Metrics

metrics_endpoint.WRITE_SEC = 0.05
metrics = Metrics()
metrics.set(names.BUILD, 1, "1.0")
metrics.ask(names.KV_BLOCKS, lambda: {("used",): 7.0})
port, folder = int(sys.argv[1]), Path(sys.argv[2])
endpoint = metrics_endpoint.MetricsEndpoint(port, "127.0.0.1", metrics, folder)
print("up", flush=True)
for line in sys.stdin:
    metrics.count(names.SWEEPS, by=int(line))
    metrics.observe(names.TOKENS_PER_CALL, 3.0, times=int(line))
    endpoint._folder.write(metrics.read())
    print("counted", flush=True)
endpoint.close()
"""


class Process:
    """One of those that share a port."""

    def __init__(self, port: int, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(port), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        )
        self._hear("up")

    def count(self, sweeps: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{sweeps}\n")
        self.process.stdin.flush()
        self._hear("counted")

    def _hear(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


class Machine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.processes: list[Process] = []

    def start(self) -> Process:
        self.processes.append(Process(self.port, self.folder))
        return self.processes[-1]

    def answers(self) -> bool:
        try:
            scrape(self.port)
        except OSError:
            return False
        return True

    @property
    def said(self) -> dict[str, float]:
        found = scrape(self.port)
        return {
            "sweeps": found.total("specbatch_sweeps_total"),
            "calls": found.total("specbatch_engine_tokens_per_call_count"),
            "tokens": found.total("specbatch_engine_tokens_per_call_sum"),
            "blocks": found.total("specbatch_engine_kv_blocks"),
            "build": found.total("specbatch_build_info"),
        }


@contextmanager
def machine_of(folder: Path) -> Iterator[Machine]:
    machine = Machine(folder)
    try:
        yield machine
    finally:
        for one in machine.processes:
            one.kill()
            for stream in (one.process.stdin, one.process.stdout):
                assert stream is not None
                stream.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with machine_of(tmp_path / "metrics") as made:
        yield made


def figures(sweeps: int, living: int) -> dict[str, float]:
    of_calls = {"calls": sweeps, "tokens": 3 * sweeps}
    return {"sweeps": sweeps, **of_calls, "blocks": 7 * living, "build": 1}


def test_two_processes_are_scraped_as_one_and_outlived_by_what_they_counted(
    machine: Machine,
) -> None:
    first, second = machine.start(), machine.start()
    first.count(1)
    second.count(20)
    assert machine.said == figures(21, living=2)
    second.kill()  # it does not serve: its counters stay, its gauges go
    assert machine.said == figures(21, living=1)
    assert machine.said == figures(21, living=1), "the dead count once"
    third = machine.start()
    third.count(300)
    assert machine.said == figures(321, living=2)
    first.kill()  # it served: the other one takes its place
    wait_until("somebody serves", machine.answers)
    assert machine.said == figures(321, living=1)
    fourth = machine.start()
    fourth.count(4000)
    third.end()
    wait_until("somebody serves", machine.answers)
    assert machine.said == figures(4321, living=1)
    fourth.end()
    assert not machine.answers()


def test_who_finds_nobody_alive_begins_anew(tmp_path: Path) -> None:
    metrics = Metrics()
    metrics.count(names.SWEEPS, by=5)
    for _ in range(2):
        folder = MetricsFolder(tmp_path)
        folder.write(metrics.read())
        assert [sums for sums in folder.others() if any(sums.get(names.SWEEPS.name, {}))] == []
        folder.close(metrics.read())
    left = {path.name for path in tmp_path.iterdir() if path.suffix == ".json"}
    assert len(left) == 1, "the files of the one before are gone"


def test_dying_while_the_dead_are_added_up_counts_nothing_twice(tmp_path: Path) -> None:
    metrics = Metrics()
    metrics.count(names.SWEEPS, by=5)
    serving = MetricsFolder(tmp_path)
    dead = MetricsFolder(tmp_path)
    dead.close(metrics.read())
    (file,) = tmp_path.glob(f"{dead._name}.json")
    content = file.read_bytes()

    assert sweeps_beside(serving) == 5
    file.write_bytes(content)  # as if it had not come to deleting it
    assert sweeps_beside(serving) == 5
    assert not file.exists()
    serving.close({})


def sweeps_beside(serving: MetricsFolder) -> float:
    """What the other processes counted."""
    found = [one.get(names.SWEEPS.name, {}).values() for one in serving.others()]
    return sum(value for values in found for value in values if isinstance(value, int))


def counted(sweeps: int) -> Snapshot:
    metrics = Metrics()
    metrics.count(names.SWEEPS, by=sweeps)
    return metrics.read()


@contextmanager
def at_replacing(do: Callable[[], None]) -> Iterator[None]:
    """`do` runs once, when a file is written and not yet in its place."""
    replace = Path.replace

    def replacing(path: Path, target: Path) -> Path:
        patch.undo()
        do()
        return replace(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", replacing)
        yield


class KilledError(Exception):
    """Stands for SIGKILL: nothing of the process runs any more."""


def kill() -> None:
    raise KilledError


def test_a_file_that_is_being_written_is_nobody_s(tmp_path: Path) -> None:
    serving, other = MetricsFolder(tmp_path), MetricsFolder(tmp_path)
    other.write(counted(5))
    seen: list[float] = []
    with at_replacing(lambda: seen.append(sweeps_beside(serving))):
        other.write(counted(9))
    assert seen == [5]
    assert sweeps_beside(serving) == 9
    for folder in (serving, other):
        folder.close({})


def test_who_is_killed_while_it_writes_counts_once_and_leaves_nothing(tmp_path: Path) -> None:
    serving, killed, newborn = (MetricsFolder(tmp_path) for _ in range(3))
    killed.write(counted(5))
    for folder in (killed, newborn):  # the latter had written nothing before
        with at_replacing(kill), pytest.raises(KilledError):
            folder.write(counted(9))
        folder._alive.close()
    assert sweeps_beside(serving) == 5
    assert sweeps_beside(serving) == 5
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"past.json", "folder.lock", f"{serving._name}.lock"}
    serving.close({})


def test_who_is_killed_while_it_adds_up_the_dead_leaves_that_to_the_next(tmp_path: Path) -> None:
    killed, dead, serving = (MetricsFolder(tmp_path) for _ in range(3))
    dead.close(counted(5))
    with at_replacing(kill), pytest.raises(KilledError):
        killed.others()
    killed._alive.close()
    assert sweeps_beside(serving) == 5
    assert not list(tmp_path.glob(".*"))
    serving.close({})


def test_who_begins_anew_removes_what_was_being_written(tmp_path: Path) -> None:
    killed = MetricsFolder(tmp_path)
    with at_replacing(kill), pytest.raises(KilledError):
        killed.write(counted(5))
    killed._alive.close()
    MetricsFolder(tmp_path).close({})
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("content", ["{", "[]", '{"sums": {"named": 1}}', '{"x": [[[[]], 1]]}'])
def test_a_file_that_makes_no_sense_costs_its_own_figures_only(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    serving, other, broken = (MetricsFolder(tmp_path) for _ in range(3))
    other.write(counted(5))
    files = [PAST, f"{broken._name}.json"]
    for name in files:
        (tmp_path / name).write_text(content)
    for _ in range(2):
        assert sweeps_beside(serving) == 5
    told = [record.getMessage() for record in caplog.records]
    assert [line.partition(" are left out: ")[0] for line in told] == [
        f"metrics of {name}" for name in files
    ]
    for folder in (serving, other, broken):
        folder.close({})


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"SPECBATCH_METRICS_DIR .*/file/in cannot be written"):
        MetricsFolder(tmp_path / "file" / "in")


def test_what_was_told_is_known_to_whoever_serves_next(tmp_path: Path) -> None:
    """However suddenly this process is killed: a counter that falls is taken for a new one."""
    metrics = Metrics()
    endpoint = MetricsEndpoint(free_port(), "127.0.0.1", metrics, tmp_path)
    try:
        metrics.count(names.SWEEPS, by=5)
        list(endpoint.collect())
        other = MetricsFolder(tmp_path)
        assert sum(merged(other.others())[names.SWEEPS.name].values()) == 5
        other.close({})
    finally:
        endpoint.close()
