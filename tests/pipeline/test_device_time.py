"""A worker's time: what engines report, what is left of the clock, and that all of it arrives."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from typing import Any, cast

import pytest
from contracts.shorthand import claim, ingest, serving
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from ledger.builders import JOB, LEASE_SEC, NO_TIME, RESULTS, Clock

from specbatch.jobs.chaos.conservation import lost_in_mid_step
from specbatch.pipeline.engines.contract import Engines, Ticket
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.policy.costs.balance import NOTHING, at
from specbatch.pipeline.runtime.device_time import StepFreeTime, Timekeeper, Timing
from specbatch.schemas.errors import FencedError, StoreError
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.provenance import NO_TICKS, Ticks
from specbatch.schemas.records import Lease, Stage
from specbatch.schemas.timekeeping import HINTS, Attempt, Device, NewSession, SessionRow, Spent
from support.databases import sqlite_store

DEVICE = Device("cpu", "local", "reserved", 200_000)
MOST_TICKS = 1000  # that time passes at once


@dataclass
class FakeTicket:
    """What an engine has counted of some requests."""

    ticks: Ticks = NO_TICKS
    is_over: bool = False


@dataclass
class Machine:
    """A clock, and a device on which one step runs at a time."""

    at: int = 5_000
    stepping_since: int | None = None

    def __call__(self) -> int:
        return self.at

    def pass_by(self, ticks: int) -> None:
        self.at += ticks

    def begin_step(self) -> None:
        self.stepping_since = self.at

    def end_step(self, *tickets: FakeTicket) -> None:
        """All of its time is shared among the tickets, the last gets what is left over."""
        assert self.stepping_since is not None
        took = self.at - self.stepping_since
        for ticket in tickets[1:]:
            ticket.ticks += Ticks(verify=took // len(tickets))
        rest = took - (len(tickets) - 1) * (took // len(tickets))
        tickets[0].ticks += Ticks(rejected=rest // 2, verify=rest - rest // 2)
        self.stepping_since = None

    def step(self, took: int, *tickets: FakeTicket) -> None:
        self.begin_step()
        self.pass_by(took)
        self.end_step(*tickets)


@dataclass
class Bed:
    """A worker with one device, and a store with a job of three groups."""

    store: SqlStore = field(default_factory=sqlite_store)
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self) -> None:
        ingest(self.store, groups=3)
        self.timekeeper = self.keep()

    def keep(self) -> Timekeeper:
        hosts = [cast(Engines, self.machine)]
        return Timekeeper(self.store, "w1", DEVICE, hosts, clock=self.machine)

    @property
    def session(self) -> SessionRow:
        return self.store.sessions()[-1]

    def advance(self, lease: Lease) -> None:
        self.timekeeper.commit(
            lease, lambda spent: self.store.advance(lease, Stage.RECORD, RESULTS, NO_TIME, spent)
        )


@pytest.fixture
def bed() -> Bed:
    return Bed()


def submitted(ticket: FakeTicket) -> Ticket:
    return cast(Ticket, ticket)


# --- the rest of the clock ------------------------------------------------------------------


def test_time_without_work_is_idle_and_time_beside_steps_is_overhead(bed: Bed) -> None:
    machine, lease = bed.machine, claim(bed.store, 0).lease
    machine.pass_by(100)
    ticket = FakeTicket()
    with bed.timekeeper.working(Attempt.of(lease)) as tickets:
        tickets.append(submitted(ticket))
        machine.pass_by(10)
        machine.step(50, ticket)
        machine.pass_by(7)
    machine.pass_by(3)
    bed.timekeeper.beat()
    assert (bed.session.idle, bed.session.overhead, bed.session.spent) == (103, 17, 50)
    assert bed.session.seen == bed.session.accounted == 170


def test_a_step_that_runs_is_not_taken_for_overhead(bed: Bed) -> None:
    machine, ticket = bed.machine, FakeTicket()
    with bed.timekeeper.working(Attempt(JOB, 0, 1, Stage.VERIFY)) as tickets:
        tickets.append(submitted(ticket))
        machine.begin_step()
        machine.pass_by(40)
        bed.timekeeper.beat()
        assert (bed.session.overhead, bed.session.spent, bed.session.seen) == (0, 0, 40)
        machine.pass_by(2)
        machine.end_step(ticket)
        bed.timekeeper.beat()
        assert (bed.session.overhead, bed.session.spent, bed.session.seen) == (0, 42, 42)


def test_what_was_given_out_is_never_taken_back() -> None:
    rest = StepFreeTime()
    rest.grow(quiet=100, busy=40, unheld=50)
    assert rest == StepFreeTime(idle=50, overhead=10)
    rest.grow(quiet=90, busy=90, unheld=50)
    assert rest == StepFreeTime(idle=50, overhead=10)
    rest.grow(quiet=151, busy=90, unheld=99)
    assert rest == StepFreeTime(idle=51, overhead=10)


# --- attempts -------------------------------------------------------------------------------


def test_an_attempt_is_told_of_once_it_has_got_on_and_no_more_after_that(bed: Bed) -> None:
    tell, told = bed.store.report_time, []

    def listening(session: Any, attempts: Any) -> None:
        told.append(dict(attempts))
        tell(session, attempts)

    cast(Any, bed.store).report_time = listening
    lease, ticket = claim(bed.store, 0).lease, FakeTicket()
    with bed.timekeeper.working(Attempt.of(lease)) as tickets:
        bed.timekeeper.beat()
        tickets.append(submitted(ticket))
        bed.machine.step(5, ticket)
        bed.timekeeper.beat()
        bed.timekeeper.beat()
        bed.machine.step(6, ticket)
        ticket.is_over = True
        bed.advance(lease)
    bed.timekeeper.beat()
    assert told == [{}, {Attempt.of(lease): Ticks(verify=3, rejected=2)}, {}, {}]
    (kept,) = bed.store.time_slices()
    assert (kept.kept, kept.ticks.total) == (True, 11)
    bed.timekeeper.close()
    assert bed.session.leased == bed.session.accounted == 11


def test_requests_that_outlive_their_attempt_are_counted_to_their_end(bed: Bed) -> None:
    ticket, attempt = FakeTicket(), Attempt(JOB, 0, 1, Stage.VERIFY)
    with bed.timekeeper.working(attempt) as tickets:
        tickets.append(submitted(ticket))
    bed.machine.step(9, ticket)
    bed.timekeeper.beat()
    bed.machine.step(4, ticket)
    ticket.is_over = True
    bed.timekeeper.close()
    assert [s.ticks.total for s in bed.store.time_slices()] == [13]
    assert bed.session.leased == 13


def test_all_hints_for_a_job_are_one_account(bed: Bed) -> None:
    hints = Attempt(JOB, 0, HINTS, Stage.PROPOSE)
    for ticks in (5, 6, 7):
        ticket = FakeTicket()
        with bed.timekeeper.working(hints) as tickets:
            tickets.append(submitted(ticket))
            bed.machine.step(ticks, ticket)
            ticket.is_over = True
        bed.timekeeper.beat()
    assert [(s.attempt, s.ticks.total) for s in bed.store.time_slices()] == [(hints, 18)]


def test_a_write_whose_answer_was_lost_counts_once(bed: Bed) -> None:
    lease, ticket = claim(bed.store, 0).lease, FakeTicket()
    with bed.timekeeper.working(Attempt.of(lease)) as tickets:
        tickets.append(submitted(ticket))
        bed.machine.step(8, ticket)
        ticket.is_over = True

        def write(spent: Spent | None) -> None:
            bed.store.advance(lease, Stage.RECORD, RESULTS, NO_TIME, spent)
            bed.store.advance(lease, Stage.RECORD, RESULTS, NO_TIME, spent)

        with pytest.raises(FencedError):
            bed.timekeeper.commit(lease, write)
    bed.timekeeper.close()
    assert [(s.ticks.total, s.kept) for s in bed.store.time_slices()] == [(8, True)]
    assert bed.session.leased == bed.session.accounted == 8


def test_a_store_that_is_away_is_told_later(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    tell = bed.store.report_time

    def away(*_: Any) -> None:
        raise StoreError("the database did not answer in time")

    cast(Any, bed.store).report_time = away
    bed.machine.pass_by(10)
    bed.timekeeper.beat()
    assert "could not report device time" in caplog.text
    cast(Any, bed.store).report_time = tell
    bed.machine.pass_by(10)
    bed.timekeeper.close()
    assert (bed.session.leased, bed.session.idle) == (20, 20)


def test_who_has_no_device_keeps_no_time(bed: Bed) -> None:
    timing, lease = Timing(), claim(bed.store, 0).lease
    with timing.working(Attempt.of(lease)) as tickets:
        assert tickets == []
        timing.commit(
            lease, lambda spent: bed.store.advance(lease, Stage.RECORD, RESULTS, NO_TIME, spent)
        )
    assert bed.store.sessions() == []


# --- a session that was given up ------------------------------------------------------------


def test_who_was_frozen_goes_on_where_its_session_ended(bed: Bed) -> None:
    lease, ticket = claim(bed.store, 0).lease, FakeTicket()
    with bed.timekeeper.working(Attempt.of(lease)) as tickets:
        tickets.append(submitted(ticket))
        bed.machine.step(30, ticket)
        bed.timekeeper.beat()
        assert bed.store.end_silent_sessions(0.0)
        bed.machine.pass_by(1000)  # it is stopped
        bed.machine.step(20, ticket)
        ticket.is_over = True
        bed.advance(lease)
    bed.timekeeper.close()
    first, second = bed.store.sessions()
    assert (first.leased, second.leased) == (30, 1020)
    assert [(s.ticks.total, s.kept) for s in bed.store.time_slices(JOB)].count((30, False)) == 1
    assert [(s.ticks.total, s.kept) for s in bed.store.time_slices(JOB)].count((20, True)) == 1
    assert second.overhead == 1000


def test_a_word_after_the_last_one_has_a_session_of_its_own(bed: Bed) -> None:
    lease, ticket = claim(bed.store, 0).lease, FakeTicket()
    with bed.timekeeper.working(Attempt.of(lease)) as tickets:
        tickets.append(submitted(ticket))
        bed.machine.step(30, ticket)
        ticket.is_over = True
        bed.timekeeper.close()
        bed.advance(lease)
    assert [(s.leased, s.accounted) for s in bed.store.sessions()] == [(30, 30), (0, 0)]
    assert sum(s.ticks.total for s in bed.store.time_slices()) == 30


def test_a_heartbeat_too_finds_that_its_session_was_given_up(
    bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    machine = bed.machine
    machine.pass_by(100)
    bed.timekeeper.beat()
    assert bed.store.end_silent_sessions(0.0)
    machine.pass_by(40)
    bed.timekeeper.beat()
    assert "it begins a new session" in caplog.text
    machine.pass_by(2)
    bed.timekeeper.close()
    first, second = bed.store.sessions()
    assert (first.leased, first.idle) == (100, 100)
    assert (second.leased, second.idle, second.overhead) == (42, 42, 0)


def test_a_step_that_outlives_its_session_belongs_to_the_next_one_from_there(bed: Bed) -> None:
    machine, ticket, later = bed.machine, FakeTicket(), FakeTicket()
    one, two = (Attempt(JOB, index, 1, Stage.VERIFY) for index in (0, 1))
    with bed.timekeeper.working(one) as tickets, bed.timekeeper.working(two) as others:
        tickets.append(submitted(ticket))
        machine.step(7, ticket)
        machine.begin_step()
        machine.pass_by(30)
        bed.timekeeper.beat()
        assert bed.store.end_silent_sessions(0.0)
        machine.pass_by(1000)
        bed.timekeeper.beat()
        machine.end_step(ticket)
        others.append(submitted(later))
        machine.step(8, later)
    bed.timekeeper.close()
    first, second = bed.store.sessions()
    assert (first.leased, first.spent, first.lost) == (37, 7, 30)
    assert (second.leased, second.spent, second.lost) == (1008, 1008, 0)
    of_second = bed.store.time_slices(session_id=second.session_id)
    assert {s.attempt: s.ticks.total for s in of_second} == {one: 1000, two: 8}


def test_rows_have_more_than_a_kept_attempt_by_what_its_ended_session_lost(bed: Bed) -> None:
    machine, lease, ticket = bed.machine, claim(bed.store, 0).lease, FakeTicket()
    with bed.timekeeper.working(Attempt.of(lease)) as tickets:
        tickets.append(submitted(ticket))
        machine.begin_step()
        machine.pass_by(30)
        bed.timekeeper.beat()
        assert bed.store.end_silent_sessions(0.0)
        assert lost_in_mid_step(bed.store.sessions()) == NOTHING  # so far it may have been killed
        machine.pass_by(70)
        machine.end_step(ticket)
        ticket.is_over = True
        bed.advance(lease)
    bed.timekeeper.close()
    kept = sum(one.ticks.total for one in bed.store.time_slices(JOB) if one.kept)
    assert ticket.ticks.total - kept == 30
    assert lost_in_mid_step(bed.store.sessions()) == at(30, DEVICE.price_microusd)


def test_a_new_session_says_how_old_it_is(bed: Bed) -> None:
    bed.machine.pass_by(100)
    ages: list[int] = []
    begin = bed.store.begin_session

    def listening(session: NewSession) -> None:
        ages.append(session.age_ticks)
        begin(session)

    cast(Any, bed.store).begin_session = listening
    bed.timekeeper.beat()
    bed.store.end_silent_sessions(0.0)
    bed.machine.pass_by(40)
    bed.timekeeper.beat()
    assert ages == [100, 40]


# --- what is served ---------------------------------------------------------------------------


def test_the_store_knows_what_a_worker_serves_and_is_told_of_changes_alone(bed: Bed) -> None:
    served: list[Serves | None] = [None]
    told: list[Serves] = []
    announce = bed.store.announce

    def listening(session_id: str, serves: Serves) -> None:
        told.append(serves)
        announce(session_id, serves)

    cast(Any, bed.store).announce = listening
    machine = bed.machine
    timekeeper = Timekeeper(
        bed.store, "w2", DEVICE, [cast(Engines, machine)], lambda: served[0], clock=machine
    )
    one, two = serving("exact/f32/1"), serving("exact/bf16/1")
    for now in (None, one, one, None, two, two):
        served[0] = now
        timekeeper.beat()
    assert told == [one, two]
    assert bed.session.serves == two


def test_of_attempts_that_are_over_and_reported_nothing_is_remembered(bed: Bed) -> None:
    for index in range(3):
        ticket, lease = FakeTicket(), claim(bed.store, index).lease
        with bed.timekeeper.working(Attempt.of(lease)) as tickets:
            tickets.append(submitted(ticket))
            bed.machine.step(5, ticket)
            ticket.is_over = True
            assert bed.timekeeper.commit(lease, lambda spent: spent is not None) is True
    bed.timekeeper.beat()
    bed.timekeeper.beat()
    assert not bed.timekeeper._accounts
    assert not bed.timekeeper._past
    assert not bed.timekeeper._reported


# --- any order of things --------------------------------------------------------------------


class Life(RuleBasedStateMachine):
    """A worker's life with all that may befall its words to the store; then every tick of it is
    somewhere, and every attempt has what engines counted, but for what ended sessions lost."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.bed = Bed(sqlite_store(self.clock, max_attempts=1000))
        self.begun = self.bed.machine.at
        self.open: list[tuple[Lease, FakeTicket, Any]] = []  # attempts, and how to leave them
        self.all: list[tuple[Attempt, FakeTicket]] = []
        self.kept: set[Attempt] = set()
        self.busy: list[FakeTicket] = []

    @rule(ticks=st.integers(1, MOST_TICKS))
    def time_passes(self, ticks: int) -> None:
        self.bed.machine.pass_by(ticks)

    @precondition(lambda self: len(self.open) < 3)
    @rule(index=st.integers(0, 2))
    def claim(self, index: int) -> None:
        work = self.bed.store.claim_group(JOB, index, Stage.VERIFY, "w1", LEASE_SEC)
        if work is None:
            return
        ticket, working = FakeTicket(), self.bed.timekeeper.working(Attempt.of(work.lease))
        working.__enter__().append(submitted(ticket))
        self.open.append((work.lease, ticket, working))
        self.all.append((Attempt.of(work.lease), ticket))

    @precondition(lambda self: self.bed.machine.stepping_since is None and self.open)
    @rule()
    def step_begins(self) -> None:
        self.bed.machine.begin_step()
        self.busy = [t for _, t in self.all if not t.is_over]

    @precondition(lambda self: self.bed.machine.stepping_since is not None)
    @rule()
    def step_ends(self) -> None:
        self.bed.machine.end_step(*self.busy)

    @precondition(lambda self: self.open and self.bed.machine.stepping_since is None)
    @rule(number=st.integers(0, 2), how=st.sampled_from(["kept", "kept twice", "released"]))
    def attempt_ends(self, number: int, how: str) -> None:
        lease, ticket, working = self.open.pop(number % len(self.open))
        ticket.is_over = True
        try:
            if how == "released":
                self.bed.store.release(lease, "it broke")
            else:
                self.keep(lease, twice=how == "kept twice")
        finally:
            working.__exit__(None, None, None)

    def keep(self, lease: Lease, twice: bool) -> None:
        def write(spent: Spent | None) -> None:
            for _ in range(1 + twice):  # as when the answer to the first was lost
                self.bed.store.advance(lease, Stage.RECORD, RESULTS, NO_TIME, spent)
                self.kept.add(Attempt.of(lease))

        try:
            self.bed.timekeeper.commit(lease, write)
        except FencedError:
            return

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 2))
    def attempt_is_abandoned(self, number: int) -> None:
        """Its requests go on."""
        lease, _, working = self.open.pop(number % len(self.open))
        self.bed.store.release(lease, "it broke")
        working.__exit__(None, None, None)

    @precondition(lambda self: self.bed.machine.stepping_since is None)
    @rule()
    def abandoned_requests_end(self) -> None:
        live = {id(ticket) for _, ticket, _ in self.open}
        for _, ticket in self.all:
            ticket.is_over = ticket.is_over or id(ticket) not in live

    @rule()
    def beat(self) -> None:
        self.bed.timekeeper.beat()

    @rule()
    def beat_without_an_answer(self) -> None:
        store = cast(Any, self.bed.store)
        tell = store.report_time

        def half(*told: Any) -> None:
            tell(*told)
            raise StoreError("the database did not answer in time")

        store.report_time = half
        try:
            self.bed.timekeeper.beat()
        finally:
            del store.report_time

    @precondition(lambda self: self.bed.machine.stepping_since is None)
    @rule(ticks=st.integers(1, MOST_TICKS))
    def is_frozen(self, ticks: int) -> None:
        """Until it is given up."""
        self.bed.store.end_silent_sessions(0.0)
        self.bed.machine.pass_by(ticks)

    def teardown(self) -> None:
        if self.bed.machine.stepping_since is not None:
            self.step_ends()
        for _, _, working in self.open:
            working.__exit__(None, None, None)
        for _, ticket in self.all:
            ticket.is_over = True
        self.bed.timekeeper.close()
        self.check()
        self.bed.store.close()

    def check(self) -> None:
        sessions, slices = self.bed.store.sessions(), list(self.bed.store.time_slices())
        assert all(s.leased == s.accounted for s in sessions)
        assert sum(s.leased or 0 for s in sessions) == self.bed.machine.at - self.begun
        missing = 0
        for attempt, ticket in self.all:
            mine = [s for s in slices if s.attempt == attempt]
            had = sum((s.ticks for s in mine), NO_TICKS)
            for counted, kept in zip(astuple(ticket.ticks), astuple(had), strict=True):
                assert kept <= counted
                missing += counted - kept
            assert any(s.kept for s in mine) == (attempt in self.kept)
        assert missing <= sum(s.lost for s in sessions)  # of steps in which a session ended
        assert sum(s.spent for s in sessions) == sum(s.ticks.total for s in slices)


@pytest.mark.pipeline  # many lives of a worker
class TestLife(Life.TestCase):  # type: ignore[misc]  # made at run time
    settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
