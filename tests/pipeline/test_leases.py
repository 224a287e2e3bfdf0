"""How soon work hears that it may not go on: of deadlines at once, of all else by looking."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from contracts.shorthand import claim, ingest
from ledger.builders import JOB, new_group, new_job, position

from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.observe.tracing.span_names import LEASE_LOST, STOPPED
from specbatch.pipeline.observe.tracing.tracing import Attributes, Span
from specbatch.pipeline.runtime import leases
from specbatch.pipeline.runtime.leases import Held, LeaseKeeper, is_dead_here, owner_here
from specbatch.schemas.errors import FencedError, StoreError
from specbatch.schemas.records import Beat, Lease, Stage
from support.databases import sqlite_store

LONG = 3600.0


@pytest.fixture
def store() -> SqlStore:
    return sqlite_store()


def held_group(store: SqlStore, **job: float) -> Lease:
    store.create_job(new_job(**job))
    work = store.claim_job(JOB, Stage.INGEST, "i", LONG)
    assert work is not None
    store.add_groups(work.lease, [new_group(0)], [], 4, position())
    group = store.claim_group(JOB, 0, Stage.VERIFY, "w", LONG)
    assert group is not None
    return group.lease


@pytest.fixture
def lease_keeper(store: SqlStore) -> Iterator[LeaseKeeper]:
    """One that does nothing of itself for an hour."""
    lease_keeper = LeaseKeeper(store, 3 * LONG, LONG)
    yield lease_keeper
    lease_keeper.close()


class Recorded(Span):
    """Keeps the names of its events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, name: str, attributes: Attributes | None = None) -> None:  # noqa: ARG002 - names are enough
        self.events.append(name)


def test_a_lost_lease_is_noted_once_and_ends_the_work(
    store: SqlStore, lease_keeper: LeaseKeeper
) -> None:
    lease, span = held_group(store), Recorded()
    with lease_keeper.hold(lease, span=span) as held:
        lease_keeper.beat()
        held.check()
        assert span.events == []
        store.expire_leases(JOB, "w")
        assert store.claim_group(JOB, 0, Stage.VERIFY, "another", LONG) is not None
        lease_keeper.beat()
        lease_keeper.beat()
        assert span.events == [LEASE_LOST]
        with pytest.raises(FencedError):
            held.check()


def test_a_stop_is_noted_once(store: SqlStore, lease_keeper: LeaseKeeper) -> None:
    lease, span = held_group(store), Recorded()
    with lease_keeper.hold(lease, span=span):
        store.request_cancel(JOB)
        lease_keeper.check_cancelled()
        lease_keeper.beat()
    assert span.events == [STOPPED]


def test_a_heartbeat_tells_of_a_stop_as_well(store: SqlStore, lease_keeper: LeaseKeeper) -> None:
    with lease_keeper.hold(held_group(store)) as held:
        lease_keeper.beat()
        assert not held.cancelled.is_set()
        store.request_cancel(JOB)
        lease_keeper.beat()
        assert held.cancelled.is_set()


def test_of_two_holders_of_one_lease_the_later_one_has_it(
    store: SqlStore, lease_keeper: LeaseKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    lease = held_group(store)
    with lease_keeper.hold(lease) as earlier:
        assert not caplog.messages
        with lease_keeper.hold(lease) as later:
            assert earlier.lost.is_set()
            assert not later.lost.is_set()
            assert [str(lease) in message for message in caplog.messages] == [True]
        assert not lease_keeper.holds(Stage.VERIFY)


def test_a_lease_keeper_holds_no_process_up(lease_keeper: LeaseKeeper) -> None:
    del lease_keeper
    threads = [one for one in threading.enumerate() if one.name == "lease-keeper"]
    assert threads
    assert all(one.daemon for one in threads)


def test_a_deadline_is_heard_of_when_it_passes(store: SqlStore, lease_keeper: LeaseKeeper) -> None:
    lease = held_group(store, deadline_sec=2)  # so long that it is held before that
    called = threading.Event()
    with lease_keeper.hold(lease, called.set) as held:
        lease_keeper.watch_deadline(held, store.get_job(JOB).deadline_at)
        assert called.wait(60)
        assert held.cancelled.is_set()
        assert time.time() >= (store.get_job(JOB).deadline_at or 0)
    assert "deadline" in (store.get_job(JOB).stop_reason or "")


def test_a_job_without_a_deadline_waits_for_the_next_look(
    store: SqlStore, lease_keeper: LeaseKeeper
) -> None:
    lease = held_group(store)
    calls: list[int] = []
    with lease_keeper.hold(lease, lambda: calls.append(1)) as held:
        lease_keeper.watch_deadline(held, None)
        store.request_cancel(JOB)
        assert not held.cancelled.is_set()
        lease_keeper.check_cancelled()
        assert held.cancelled.is_set()
        lease_keeper.check_cancelled()
        lease_keeper.beat()
    assert calls == [1], "once"


def test_looking_tells_what_each_group_has_cost(store: SqlStore, lease_keeper: LeaseKeeper) -> None:
    lease = held_group(store, budget_usd=1.0)
    with lease_keeper.hold(lease) as held:
        lease_keeper.check_cancelled()
        assert not held.cancelled.is_set(), "it has cost nothing"
        held.spent_usd = lambda: 0.9
        lease_keeper.check_cancelled()
        assert not held.cancelled.is_set()
        held.spent_usd = lambda: 1.1
        lease_keeper.check_cancelled()
        assert held.cancelled.is_set()


def test_a_store_that_is_away_stops_nothing(
    store: SqlStore,
    lease_keeper: LeaseKeeper,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")

    def away(_: object) -> set[str]:
        raise StoreError("the database is away")

    lease = held_group(store)
    with lease_keeper.hold(lease) as held:
        with monkeypatch.context() as patch:
            patch.setattr(store, "cancelled_jobs", away)
            lease_keeper.check_cancelled()
        assert not held.cancelled.is_set()
        assert [m for m in caplog.messages if "the database is away" in m]
        store.request_cancel(JOB)
        lease_keeper.check_cancelled()
        assert held.cancelled.is_set()


def test_no_answer_is_no_confirmation(
    store: SqlStore, lease_keeper: LeaseKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> Beat:
        raise StoreError("the database is away")

    lease = held_group(store)
    with lease_keeper.hold(lease) as held:
        lease_keeper.confirm(held)
        with monkeypatch.context() as patch:
            patch.setattr(store, "heartbeat", away)
            lease_keeper.beat()  # only a heartbeat: the next one will do
            with pytest.raises(StoreError, match="away"):
                lease_keeper.confirm(held)
        lease_keeper.confirm(held)


def test_a_lease_that_another_worker_has_is_not_confirmed(
    store: SqlStore, lease_keeper: LeaseKeeper
) -> None:
    with lease_keeper.hold(held_group(store)) as held:
        lease_keeper.confirm(held)
        store.expire_leases(JOB, "w")
        assert store.claim_group(JOB, 0, Stage.VERIFY, "another", LONG) is not None
        with pytest.raises(FencedError):
            lease_keeper.confirm(held)


def test_what_an_attempt_used_so_far_is_reported_while_it_goes_on(
    store: SqlStore, lease_keeper: LeaseKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[list[Lease]] = []
    monkeypatch.setattr(store, "report_usage", lambda meters: reported.append(list(meters)))
    lease = held_group(store)
    with lease_keeper.hold(lease):
        lease_keeper.report_usage()
        assert reported == [[lease]]


def test_all_groups_of_a_job_know_that_it_stops_before_any_work_on_it_ends(
    store: SqlStore, lease_keeper: LeaseKeeper
) -> None:
    """The engine ends them all at once: one that knew nothing would not keep what it has."""
    store.create_job(new_job())
    work = store.claim_job(JOB, Stage.INGEST, "i", LONG)
    assert work is not None
    store.add_groups(work.lease, [new_group(0), new_group(1)], [], 8, position(8))
    two = [claim(store, index).lease for index in (0, 1)]
    knew: list[list[bool]] = []
    held: list[Held] = []

    def on_cancel() -> None:
        knew.append([entry.cancelled.is_set() for entry in held])

    with (
        lease_keeper.hold(two[0], on_cancel) as first,
        lease_keeper.hold(two[1], on_cancel) as second,
    ):
        held += [first, second]
        store.request_cancel(JOB)
        lease_keeper.check_cancelled()
    assert knew == [[True, True], [True, True]]


def test_the_keeper_looks_by_itself(store: SqlStore) -> None:
    lease, called = held_group(store), threading.Event()
    lease_keeper = LeaseKeeper(store, 3 * LONG, check_sec=0.01)
    try:
        with lease_keeper.hold(lease, called.set):
            store.request_cancel(JOB)
            assert called.wait(60)
    finally:
        lease_keeper.close()


def test_a_heartbeat_that_fails_in_an_unforeseen_way_is_not_the_last_one(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beats, again = [], threading.Event()
    real = store.heartbeat

    def heartbeat(held: list[Lease], lease_sec: float) -> Beat:
        beats.append(held)
        if len(beats) == 1:
            raise RuntimeError("nobody thought of this")
        again.set()
        return real(held, lease_sec)

    lease = held_group(store)
    monkeypatch.setattr(store, "heartbeat", heartbeat)
    lease_keeper = LeaseKeeper(store, lease_sec=0.03, check_sec=LONG)
    try:
        with lease_keeper.hold(lease) as held:
            assert again.wait(60)
            assert not held.lost.is_set()
        assert "nobody thought of this" in caplog.text
    finally:
        lease_keeper.close()


def test_something_is_done_with_every_heartbeat_leases_or_not(store: SqlStore) -> None:
    lease_keeper, done = LeaseKeeper(store, 0.03, LONG), threading.Event()
    try:
        lease_keeper.at_heartbeats(done.set)
        assert done.wait(60)
    finally:
        lease_keeper.close()


def test_something_is_done_with_every_check_of_leases_in_use(store: SqlStore) -> None:
    lease_keeper, done = LeaseKeeper(store, 3 * LONG, check_sec=0.01), threading.Event()
    try:
        lease_keeper.at_checks(done.set)
        with lease_keeper.hold(held_group(store)):
            assert done.wait(60)
    finally:
        lease_keeper.close()


def test_a_process_holds_stages_of_what_it_has_claimed(
    store: SqlStore, lease_keeper: LeaseKeeper
) -> None:
    lease = held_group(store)
    assert [stage for stage in Stage if lease_keeper.holds(stage)] == []
    with lease_keeper.hold(lease):
        assert [stage for stage in Stage if lease_keeper.holds(stage)] == [Stage.VERIFY]
    assert [stage for stage in Stage if lease_keeper.holds(stage)] == []


def test_who_holds_a_group_hears_once_that_an_idle_worker_asks_for_half_of_it(
    store: SqlStore, lease_keeper: LeaseKeeper
) -> None:
    asked: list[str] = []
    ingest(store, groups=1)
    with lease_keeper.hold(claim(store, 0).lease) as held:
        held.when_asked_to_split(lambda: asked.append("before"))
        lease_keeper.beat()
        assert (asked, held.split_wanted) == ([], False)
        assert store.ask_for_split("big", "idle") is not None
        lease_keeper.beat()
        lease_keeper.beat()
        assert (asked, held.split_wanted) == (["before"], True)
        held.when_asked_to_split(lambda: asked.append("after"))
        assert asked == ["before", "after"], "who comes later hears it at once"
        lease_keeper.beat()
        assert asked == ["before", "after"]


class Simulated:
    """The keeper's clock. Time passes when its thread waits, from `begin` to the last note."""

    def __init__(self, notes: int) -> None:
        self.now, self.noted = 0.0, list[float]()
        self._notes, self._begun, self._over = notes, threading.Event(), threading.Event()
        self._ended = threading.Event()

    def note(self) -> None:
        """To be called by the keeper. After the last time it waits for the test."""
        if len(self.noted) < self._notes:
            self.noted.append(self.now)
        if len(self.noted) == self._notes:
            self._over.set()
            self._ended.wait(60)

    def times(self) -> list[float]:
        """When it was called, from the begin on."""
        self._begun.set()
        assert self._over.wait(60), self.noted
        return self.noted

    def end(self) -> None:
        self._begun.set()
        self._ended.set()

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def event(self) -> threading.Event:
        """An event that time passes for while somebody waits for it."""
        clock = self

        class Event(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                clock._begun.wait(60)
                if not self.is_set():
                    assert timeout is not None
                    clock.now += timeout
                return self.is_set()

        return Event()


@contextmanager
def simulated(
    store: SqlStore, notes: int, lease_sec: float, **options: float
) -> Iterator[tuple[Simulated, LeaseKeeper]]:
    """A keeper with such a clock."""
    clock = Simulated(notes)
    its_threading = SimpleNamespace(Event=clock.event, Lock=threading.Lock, Thread=threading.Thread)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases, "time", clock)
        patch.setattr(leases, "threading", its_threading)
        lease_keeper = LeaseKeeper(store, lease_sec, **options)
        try:
            yield clock, lease_keeper
        finally:
            clock.end()
            lease_keeper.close()


def test_a_lease_is_extended_three_times_in_its_life_and_no_more_often(store: SqlStore) -> None:
    with simulated(store, 4, lease_sec=90.0, check_sec=LONG) as (clock, lease_keeper):
        lease_keeper.at_heartbeats(clock.note)
        assert clock.times() == [30.0, 60.0, 90.0, 120.0]


def test_between_heartbeats_the_keeper_looks_every_second(store: SqlStore) -> None:
    with simulated(store, 5, lease_sec=4.5) as (clock, lease_keeper):
        lease_keeper.at_checks(clock.note)
        with lease_keeper.hold(held_group(store)):
            assert clock.times() == [1.0, 1.5, 2.5, 3.0, 4.0]
            clock.end()


@pytest.mark.parametrize(
    ("deadline_in", "first_looks"),
    [
        (None, [100.0, 200.0, 300.0]),
        (10.0, [0.0, 10.0, 10.05]),
        (-1.0, [0.0, 0.05, 0.1]),
        (-5.5, [0.0, 100.0, 200.0]),
        (150.0, [0.0, 100.0, 150.0]),
        (2 * LONG, [0.0, 100.0, 200.0]),
    ],
)
def test_the_keeper_looks_when_a_deadline_passes_and_often_until_the_store_says_so(
    store: SqlStore, deadline_in: float | None, first_looks: list[float]
) -> None:
    with simulated(store, 3, lease_sec=3 * LONG, check_sec=100.0) as (clock, lease_keeper):
        lease_keeper.at_checks(clock.note)
        with lease_keeper.hold(held_group(store)) as held:
            lease_keeper.watch_deadline(held, deadline_in)
            assert clock.times() == pytest.approx(first_looks)
            clock.end()


def test_a_deadline_that_was_lifted_is_asked_for_some_seconds_and_no_longer(
    store: SqlStore,
) -> None:
    """The store's clock may be behind by so much, and not by more."""
    with simulated(store, 103, lease_sec=3 * LONG, check_sec=100.0) as (clock, lease_keeper):
        lease_keeper.at_checks(clock.note)
        with lease_keeper.hold(held_group(store)) as held:
            lease_keeper.watch_deadline(held, 10.0)
            times = clock.times()
            clock.end()
    assert times[-2] == pytest.approx(15.0, abs=0.06)
    assert times[-1] == pytest.approx(times[-2] + 100.0)


def test_the_deadline_of_a_job_that_is_known_to_stop_makes_nobody_look(store: SqlStore) -> None:
    with simulated(store, 3, lease_sec=3 * LONG, check_sec=100.0) as (clock, lease_keeper):
        lease_keeper.at_checks(clock.note)
        with lease_keeper.hold(held_group(store)) as held:
            lease_keeper.watch_deadline(held, 10.0)
            held.cancelled.set()
            assert clock.times() == [0.0, 100.0, 200.0]
            clock.end()


def test_a_closed_keeper_has_ended(store: SqlStore) -> None:
    before = set(threading.enumerate())
    LeaseKeeper(store, 3 * LONG, LONG).close()
    assert set(threading.enumerate()) <= before


def test_a_store_that_is_away_is_told_of_and_ends_no_work(
    store: SqlStore,
    lease_keeper: LeaseKeeper,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")

    def away(*_: object) -> None:
        raise StoreError("the database is away")

    lease = held_group(store)
    with monkeypatch.context() as patch:
        patch.setattr(store, "heartbeat", away)
        patch.setattr(store, "report_usage", away)
        with lease_keeper.hold(lease) as held:
            lease_keeper.beat()
            lease_keeper.report_usage()
            assert not held.lost.is_set()
            held.check()
    told = [message for message in caplog.messages if "the database is away" in message]
    assert told[0].startswith("heartbeat failed, leases may expire")
    assert any(message.startswith("could not report what attempts used") for message in told)


# --- names of processes -------------------------------------------------------------------------
def test_a_process_that_has_ended_is_known_by_its_name_and_no_other_is() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    machine, _, mine = owner_here().rpartition(":")
    assert mine == str(os.getpid())
    name = f"{machine}:{child.pid}"
    assert not is_dead_here(name)
    assert not is_dead_here(owner_here())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead_here(name), "its parent has not waited for it, yet it has ended"
    child.communicate()
    assert is_dead_here(name)
    for other in (f"elsewhere:{child.pid}", f"{machine}:verify", f"{machine}:", str(child.pid)):
        assert not is_dead_here(other)


def test_a_process_of_another_user_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_pid: int, _signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    assert not is_dead_here(owner_here())


def test_a_process_of_which_nothing_can_be_read_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr(os, "kill", lambda _pid, _signal: None)
    machine, _, _ = owner_here().rpartition(":")
    assert not is_dead_here(f"{machine}:{ended.pid}")
