"""Plans come from their seeds alone, and together they leave nothing out."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from specbatch.jobs.chaos.faults import Armed, count, errors_at
from specbatch.jobs.chaos.orders import Arming
from specbatch.jobs.chaos.plan import (
    DEEDS,
    POINTS,
    Deed,
    Disturbance,
    IncidentKind,
    incident_plan_of,
    plan_of,
)
from specbatch.jobs.chaos.worker import UnrulyQueue
from specbatch.schemas.crash_points import CrashPoint
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.records import DueWork, Stage


def test_a_seed_gives_one_plan() -> None:
    plans = [plan_of(seed, 2) for seed in range(50)]
    assert plans == [plan_of(seed, 2) for seed in range(50)]
    assert len(set(plans)) == len(plans)


@pytest.mark.parametrize("begin", [0, 7, 1000])
def test_any_thirty_seeds_in_a_row_have_every_deed_at_every_point(begin: int) -> None:
    first = [plan_of(seed, 2).disturbances[0] for seed in range(begin, begin + 30)]
    assert {(d.point, d.deed) for d in first} == {(p, d) for p in POINTS for d in DEEDS}
    assert set(POINTS) == set(CrashPoint)


def test_plans_vary_in_all_they_have() -> None:
    plans = [plan_of(seed, 3) for seed in range(200)]
    assert {p.group_size for p in plans} == {3, 4, 6}
    assert {p.writes_ahead for p in plans} == {True, False}
    assert any(p.message_seed is None for p in plans)
    assert any(p.message_seed is not None for p in plans)
    assert {d.worker for p in plans for d in p.disturbances} == {None, 0, 1, 2}
    assert {len(p.disturbances) for p in plans} == {1, 2, 3}
    for plan in plans:
        drafts = any(d.point is CrashPoint.DRAFT_WRITE for d in plan.disturbances)
        assert plan.writes_ahead or not drafts, "it could not be reached"


@pytest.mark.parametrize("begin", [0, 5, 1000])
def test_any_nine_seeds_in_a_row_have_every_incident(begin: int) -> None:
    plans = [incident_plan_of(seed, 2) for seed in range(begin, begin + 9)]
    assert {p.incident.kind for p in plans if p.incident} == set(IncidentKind)
    assert plans == [incident_plan_of(seed, 2) for seed in range(begin, begin + 9)]
    assert all(d.worker is None for p in plans for d in p.disturbances)
    assert str(plans[0]).startswith(f"seed {begin}: {plans[0].incident}")


def test_a_plan_says_what_it_does() -> None:
    d = Disturbance(CrashPoint.UPLOAD, Deed.FREEZE, nth=2, worker=1)
    assert str(d) == "freeze worker 1 at upload, time 2"
    assert str(plan_of(3, 2)).startswith("seed 3: kill ")


# --- in the worker --------------------------------------------------------------------------
def test_places_are_counted_over_all_workers(tmp_path: Path) -> None:
    told: list[tuple[int, int, int]] = []
    d = Disturbance(CrashPoint.LEASE, Deed.BREAK, nth=3)
    workers = [
        Armed(n, on_postgres=False, on_fire=lambda run, index, n=n: told.append((n, run, index)))
        for n in range(2)
    ]
    for worker in workers:
        worker.arm(Arming(7, (d,), str(tmp_path)))
    workers[0](CrashPoint.LEASE)
    workers[1](CrashPoint.ACK)
    workers[1](CrashPoint.LEASE)
    with pytest.raises(Exception, match="did not answer"):
        workers[0](CrashPoint.LEASE)
    workers[1](CrashPoint.LEASE)
    assert told == [(0, 7, 0)]


def test_a_disturbance_of_one_worker_leaves_the_others_alone(tmp_path: Path) -> None:
    d = Disturbance(CrashPoint.UPLOAD, Deed.BREAK, worker=1)
    other, meant = (Armed(n, on_postgres=False, on_fire=lambda *_: None) for n in (0, 1))
    for worker in (other, meant):
        worker.arm(Arming(1, (d,), str(tmp_path)))
    other(CrashPoint.UPLOAD)
    with pytest.raises(ObjectError, match="no space left"):
        meant(CrashPoint.UPLOAD)
    meant.arm(Arming(2, (), str(tmp_path)))
    meant(CrashPoint.UPLOAD)


def ignore(run: int, index: int) -> None:
    """Nobody asks."""


def test_a_full_disk_fails_whatever_is_written_until_there_is_room(tmp_path: Path) -> None:
    worker = Armed(0, on_postgres=False, on_fire=ignore)
    full = tmp_path / "full"
    worker.arm(Arming(1, (), str(tmp_path), full=str(full)))
    worker(CrashPoint.SQL_COMMIT)
    full.touch()
    for _ in range(3):
        with pytest.raises(sqlite3.OperationalError, match="disk is full"):
            worker(CrashPoint.SQL_COMMIT)
        with pytest.raises(ObjectError, match="no space left"):
            worker(CrashPoint.MANIFEST)
    worker(CrashPoint.LEASE)
    full.unlink()
    worker(CrashPoint.SQL_COMMIT)


def test_a_clock_is_wrong_by_whatever_name_it_is_read() -> None:
    """In a process of its own: nothing puts the true names back."""
    code = (
        "import time; from time import time as by_name;"
        "from specbatch.jobs.chaos import clock; true = time.monotonic() - time.time();"
        "clock.set_ahead(600);"
        "said = [time.time(), by_name(), time.time_ns() / 1e9];"
        "print([round(time.monotonic() - true - each) for each in said]);"
        "clock.set_ahead(0); print(round(time.monotonic() - true - time.time()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[-600, -600, -600]", "0"]


def test_numbers_are_given_out_once(tmp_path: Path) -> None:
    assert [count(tmp_path / "a") for _ in range(3)] == [1, 2, 3]
    assert count(tmp_path / "b") == 1


@pytest.mark.parametrize("on_postgres", [False, True], ids=["sqlite", "postgres"])
def test_every_point_has_an_error_of_its_own_kind(on_postgres: bool) -> None:
    for point in CrashPoint:
        assert errors_at(point, on_postgres)
    once, for_good = errors_at(CrashPoint.SQL_COMMIT, on_postgres)
    from specbatch.pipeline.ledger.sql.transactions import is_transient

    assert is_transient(once)
    assert not is_transient(for_good)


# --- messages ----------------------------------------------------------------------------------
def messages(number: int) -> list[DueWork]:
    return [DueWork("job00000000000001", Stage.VERIFY, index) for index in range(number)]


def test_unruly_messages_are_doubled_held_back_and_changed_in_order() -> None:
    heard: list[DueWork] = []
    queue = UnrulyQueue()
    enqueue = queue.wrap(heard.append)
    queue.seed(5)
    for message in messages(100):
        enqueue(message)
    times = Counter(heard)
    assert len(times) > 90, "most come in the end"
    assert max(times.values()) > 1, "some are doubled"
    order = [message.group_index or 0 for message in heard]
    assert order != sorted(order)
    late = [number for at, number in enumerate(order) if number < max(order[: at + 1]) - 2]
    assert late, "some come long after others"


def test_a_copy_may_come_after_other_messages_that_follow_the_first() -> None:
    """Else no run would meet a message about work that another worker has continued."""
    heard: list[list[DueWork]] = []
    queue = UnrulyQueue()
    enqueue = queue.wrap(lambda message: heard[-1].append(message))
    queue.seed(5)
    for message in messages(100):
        heard.append([])
        enqueue(message)
    before: set[DueWork] = set()
    late = 0
    for batch in heard:
        late += len(before & set(batch))
        before |= set(batch)
    assert late > 0


def test_the_same_seed_delivers_alike_and_none_delivers_as_it_is() -> None:
    def enqueue_all(seed: int | None) -> list[DueWork]:
        heard: list[DueWork] = []
        queue = UnrulyQueue()
        enqueue = queue.wrap(heard.append)
        queue.seed(seed)
        for message in messages(30):
            enqueue(message)
        return heard

    assert enqueue_all(None) == messages(30)
    assert enqueue_all(1) == enqueue_all(1) != enqueue_all(2)


def test_what_was_held_back_comes_with_the_next_message_when_all_is_calm_again() -> None:
    heard: list[DueWork] = []
    queue = UnrulyQueue()
    enqueue = queue.wrap(heard.append)
    queue.seed(3)
    for message in messages(20):
        enqueue(message)
    queue.seed(None)
    last = DueWork("job00000000000001", Stage.RECORD, 0)
    enqueue(last)
    assert heard[-1] == last
    assert set(messages(20)) <= set(heard)
