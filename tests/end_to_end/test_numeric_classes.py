"""A fleet of two workers whose bits differ: a job is verified in one class, until it is moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from specbatch.pipeline.bootstrap import make_client, make_store
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.settings import Settings
from specbatch.schemas.timekeeping import LEASES_OF_SILENCE
from support import demo
from support.workers import WorkerProcess, command, wait_until, worker

GROUPS = 6  # of one row each
NATIVE = "exact/f32/1"
LEASE_SEC = 3


def write_spec(folder: Path) -> str:
    """A job that takes one worker a few seconds."""
    pq.write_table(pq.read_table(demo.PROMPTS).slice(0, GROUPS), folder / "prompts.parquet")
    spec = {
        "input": {"uri": "prompts.parquet"},
        "output": {"uri": "out"},
        "verifier": str(demo.VERIFIER),
        "sampling": {"max_tokens": 80, "temperature": 0.8, "seed": 3, "ignore_eos": True},
        "speculation": {"depth": "off"},
        "engine": {"dtype": "float32"},
        "group_size": 1,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(spec))
    return "job.yaml"


class Fleet:
    """Two verify workers of different classes, and those who read and record for them."""

    def __init__(self, redis_url: str, home: Path, stack: ExitStack) -> None:
        self.home = home
        self.environment = {
            "SPECBATCH_BROKER_URL": redis_url,
            "SPECBATCH_WORKSPACE": str(home / "workspace"),
            "SPECBATCH_LEASE_SEC": str(LEASE_SEC),
            "SPECBATCH_SWEEP_INTERVAL_SEC": "0.5",
        }
        self.store = make_store(Settings(workspace=str(home / "workspace")))
        stack.callback(self.store.close)
        self.others = [self.start(stack, {}, kind) for kind in ("ingest", "record")]
        verify = ("verify", "--verifier", str(demo.VERIFIER), "--concurrency", "1")
        self.verifiers = {
            "native": self.start(stack, {}, *verify, name="native"),
            "torch": self.start(stack, {"SPECBATCH_NATIVE": "0"}, *verify, name="torch"),
        }

    def start(
        self, stack: ExitStack, more: dict[str, str], *arguments: str, name: str = ""
    ) -> WorkerProcess:
        environment = self.environment | more
        process = worker(*arguments, environment=environment, cwd=self.home, name=name)
        return stack.enter_context(process)

    def announced(self) -> dict[str, str]:
        """The class in which each worker would run the job, by "native" or "torch"."""
        told = [one.serves for one in self.store.sessions() if one.serves and not one.ended_at]
        return {"native" if of == NATIVE else "torch": of for of in map(class_of, told)}

    def show(self, job_id: str) -> dict[str, Any]:
        return self.command("show", job_id)

    def command(self, *arguments: str) -> dict[str, Any]:
        called = arguments if arguments[0] == "submit-job" else ("specbatch", *arguments)
        return command(*called, environment=self.environment, cwd=self.home)

    def waits_for(self, job_id: str) -> str | None:
        client = make_client(Settings(), lambda _: None, self.store)
        return client.waits_for(job_id, LEASES_OF_SILENCE * LEASE_SEC)

    def classes_of_groups(self, job_id: str) -> dict[int, set[str | None]]:
        """Of what is recorded so far."""
        found = defaultdict[int, set[str | None]](set)
        for record in self.store.completions(job_id):
            found[record.row_index].add(record.numeric_class)
        return found


def class_of(serves: Serves) -> str:
    name = serves.class_of("float32/bitwise/as-is")
    assert name is not None
    return name


@pytest.fixture
def fleet(redis_url: str, tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(redis_url, tmp_path, stack)


def test_a_job_stays_in_one_class_until_it_is_moved(fleet: Fleet, tmp_path: Path) -> None:
    alive = [*fleet.verifiers.values(), *fleet.others]
    wait_until("both have announced themselves", lambda: len(fleet.announced()) == 2, alive)
    classes = fleet.announced()
    assert classes["native"] == NATIVE
    assert classes["torch"].startswith("torch/f32/")

    job_id = fleet.command("submit-job", write_spec(tmp_path))["job"]
    wait_until("two groups are recorded", lambda: len(fleet.classes_of_groups(job_id)) >= 2, alive)
    pinned = fleet.store.get_job(job_id).numeric_class
    assert pinned in classes.values()
    winner, loser = ("native", "torch") if pinned == NATIVE else ("torch", "native")
    fleet.verifiers[winner].kill()

    expected = f"waits for a worker of numeric class {pinned}; alive: {classes[loser]}"
    left = [fleet.verifiers[loser], *fleet.others]
    wait_until("it is missed", lambda: fleet.waits_for(job_id) == expected, left)
    assert fleet.show(job_id)["waits_for"] == expected
    before = fleet.classes_of_groups(job_id)
    assert 2 <= len(before) < GROUPS, "it was killed in the middle"
    assert set.union(*before.values()) == {pinned}

    other = classes[loser]
    moved = fleet.command("retry", job_id, "--numeric-class", other)
    assert moved["units"] > 0
    wait_until("the job's end", lambda: fleet.store.get_job(job_id).state.is_final, left)
    assert fleet.store.get_job(job_id).state == "done"
    assert fleet.show(job_id)["waits_for"] is None

    after = fleet.classes_of_groups(job_id)
    assert len(after) == GROUPS
    assert all(len(found) == 1 for found in after.values()), "no group has two classes"
    assert {index: after[index] for index in before} == before
    assert set.union(*after.values()) == {pinned, other}
    output = read_output(str(tmp_path / "out"))
    written = set(output.column("numeric_class").to_pylist())
    assert written == {pinned, other}
