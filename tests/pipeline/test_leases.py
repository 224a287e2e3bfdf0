"""How soon work hears that it may not go on: of deadlines at once, of all else by looking."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from contracts.shorthand import claim
from ledger.builders import JOB, new_group, new_job, position

from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.observe.tracing.span_names import LEASE_LOST, STOPPED
from specbatch.pipeline.observe.tracing.tracing import Attributes, Span
from specbatch.pipeline.runtime.leases import Held, LeaseKeeper
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


def test_all_groups_of_a_job_know_that_it_stops_before_any_work_on_it_ends(
    store: SqlStore, lease_keeper: LeaseKeeper
) -> None:
    """The engine ends them all at once: one that knew nothing would not keep what it has."""
    store.create_job(new_job())
    work = store.claim_job(JOB, Stage.INGEST, "i", LONG)
    assert work is not None
    store.add_groups(work.lease, [new_group(0), new_group(1)], [], 8, position(8))
    leases = [claim(store, index).lease for index in (0, 1)]
    knew: list[list[bool]] = []
    held: list[Held] = []

    def on_cancel() -> None:
        knew.append([entry.cancelled.is_set() for entry in held])

    with (
        lease_keeper.hold(leases[0], on_cancel) as first,
        lease_keeper.hold(leases[1], on_cancel) as second,
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

    def heartbeat(leases: list[Lease], lease_sec: float) -> Beat:
        beats.append(leases)
        if len(beats) == 1:
            raise RuntimeError("nobody thought of this")
        again.set()
        return real(leases, lease_sec)

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
