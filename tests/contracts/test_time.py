"""Sessions of workers and what attempts had of them, with one test body for both databases."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from contracts.shorthand import claim, ingest, stage_of, successes, together, verified
from ledger.builders import DRAFTS, JOB, LEASE_SEC, NO_TIME, RESULTS, START, Clock, completion

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import FencedError, SessionEndedError
from specbatch.schemas.provenance import TICKS_PER_SEC, Ticks
from specbatch.schemas.records import Lease, Stage
from specbatch.schemas.timekeeping import (
    HINTS,
    Attempt,
    Device,
    JobTime,
    NewSession,
    RowTime,
    SessionRow,
    SessionTime,
    Spent,
    TimeSlice,
    usd_of,
)

SESSION = "session-1"
DEVICE = Device("h200", "eu-west", "spot", 2_500_000)
SOME = Ticks(prefill=1, verify=2, draft=3, rejected=4, padding=5, overhead=6)


def begin(store: Store, session_id: str = SESSION, age_ticks: int = 0) -> None:
    store.begin_session(NewSession(session_id, "w1", DEVICE, age_ticks))


def attempt(index: int = 0, generation: int = 1, stage: Stage = Stage.VERIFY) -> Attempt:
    return Attempt(JOB, index, generation, stage)


def told(seen: int = 0, idle: int = 0, overhead: int = 0, session: str = SESSION) -> SessionTime:
    return SessionTime(session, seen, idle, overhead)


def the_session(store: Store) -> SessionRow:
    (row,) = store.sessions()
    return row


def slices(store: Store, **which: Any) -> list[TimeSlice]:
    return list(store.time_slices(**which))


def test_a_session_comes_back_with_every_field(store: Store) -> None:
    begin(store, age_ticks=3 * TICKS_PER_SEC)
    begin(store, age_ticks=9 * TICKS_PER_SEC)  # it is known: as when an answer was lost
    store.report_time(told(100, 20, 10), {attempt(): SOME})
    assert the_session(store) == SessionRow(
        SESSION,
        "w1",
        DEVICE,
        started_at=START - 3,
        ended_at=None,
        seen=100,
        leased=None,
        idle=20,
        overhead=10,
        lost=0,
        spent=21,
    )
    assert slices(store) == [
        TimeSlice(SESSION, attempt(), SOME, kept=False, in_flight=False, device=DEVICE)
    ]


def test_counters_only_grow_so_that_a_word_may_come_twice_or_late(store: Store) -> None:
    begin(store)
    store.report_time(told(50, 20, 5), {attempt(): Ticks(verify=9, draft=1)})
    store.report_time(told(40, 10, 7), {attempt(): Ticks(verify=4, draft=2)})
    store.report_time(told(), {})
    row = the_session(store)
    assert (row.seen, row.idle, row.overhead, row.spent) == (50, 20, 7, 11)
    assert slices(store)[0].ticks == Ticks(verify=9, draft=2)


def test_a_session_ends_with_all_of_its_time_somewhere(store: Store, clock: Clock) -> None:
    begin(store)
    clock.advance(9)
    store.end_session(told(100, 30, 49), {attempt(): SOME})
    row = the_session(store)
    assert (row.leased, row.accounted, row.lost, row.ended_at) == (100, 100, 0, START + 9)
    store.end_session(told(999, 999, 999), {attempt(): SOME})
    store.end_session(told(session="nobody's"), {})
    assert the_session(store) == row


def test_what_nobody_told_before_a_session_was_given_up_is_lost(store: Store, clock: Clock) -> None:
    begin(store)
    store.report_time(told(100, 30, 40), {attempt(): SOME})
    clock.advance(60)
    assert store.end_silent_sessions(61) == []
    assert the_session(store).ended_at is None
    assert store.end_silent_sessions(60) == [SESSION]
    row = the_session(store)
    assert (row.leased, row.accounted, row.lost) == (100, 100, 9)
    assert store.end_silent_sessions(0) == []


def test_a_session_lasts_as_long_as_what_it_was_used_for(store: Store, clock: Clock) -> None:
    begin(store)
    store.report_time(told(10), {attempt(): SOME})
    clock.advance(60)
    store.end_silent_sessions(60)
    assert (the_session(store).leased, the_session(store).lost) == (21, 0)


def test_who_is_heard_of_is_not_given_up(store: Store, clock: Clock) -> None:
    begin(store)
    begin(store, "session-2")
    clock.advance(60)
    store.report_time(told(1), {})
    assert store.end_silent_sessions(60) == ["session-2"]


def test_nothing_is_told_to_a_session_that_has_ended_or_never_was(store: Store) -> None:
    begin(store)
    store.end_session(told(10, 10), {})
    for session in (SESSION, "nobody's"):
        with pytest.raises(SessionEndedError):
            store.report_time(told(20, 20, session=session), {attempt(): SOME})
    assert the_session(store).accounted == 10
    assert slices(store) == []


# --- with results ---------------------------------------------------------------------------


def advance(store: Store, lease: Lease, ticks: Ticks = SOME, session: str = SESSION) -> None:
    to, made = (Stage.RECORD, RESULTS) if lease.stage is Stage.VERIFY else (Stage.VERIFY, DRAFTS)
    store.advance(lease, to, made, NO_TIME, Spent(session, 70, ticks))


def test_results_bring_the_time_that_they_took(store: Store) -> None:
    ingest(store, groups=1, first_stage=Stage.PROPOSE)
    begin(store)
    draft = claim(store, 0, Stage.PROPOSE).lease
    advance(store, draft, Ticks(prefill=5))
    verify = claim(store, 0).lease
    store.report_time(told(60), {Attempt.of(verify): Ticks(verify=1, rejected=1)})
    advance(store, verify)
    store.report_time(told(80), {Attempt.of(verify): SOME})  # it does not know yet
    assert slices(store) == [
        TimeSlice(SESSION, Attempt.of(draft), Ticks(prefill=5), True, False, DEVICE),
        TimeSlice(SESSION, Attempt.of(verify), SOME, True, False, DEVICE),
    ]
    row = the_session(store)
    assert (row.seen, row.spent) == (80, 26)


def test_an_attempt_that_goes_on_or_came_to_nothing_is_not_kept(store: Store) -> None:
    ingest(store, groups=2)
    begin(store)
    given_back, held = claim(store, 0).lease, claim(store, 1).lease
    store.report_time(told(60), {Attempt.of(given_back): SOME, Attempt.of(held): SOME})
    store.release(given_back, "it broke")
    assert [(s.kept, s.in_flight) for s in slices(store)] == [(False, False), (False, True)]


def test_a_late_holder_brings_no_time(store: Store, clock: Clock) -> None:
    ingest(store, groups=1)
    begin(store)
    late = claim(store, 0).lease
    clock.advance(LEASE_SEC)
    claim(store, 0, owner="w2")
    with pytest.raises(FencedError):
        advance(store, late)
    assert slices(store) == []
    assert the_session(store).seen == 0


def test_results_wait_for_a_session_that_lives(store: Store) -> None:
    ingest(store, groups=1)
    begin(store)
    store.end_session(told(10), {})
    lease = claim(store, 0).lease
    with pytest.raises(SessionEndedError):
        advance(store, lease)
    assert slices(store) == []
    begin(store, "session-2")
    advance(store, lease, session="session-2")
    assert [s.session_id for s in slices(store)] == ["session-2"]
    assert claim(store, 0, Stage.RECORD)


def test_what_is_kept_of_a_stopped_group_brings_the_time_of_all_of_it(store: Store) -> None:
    ingest(store, groups=1)
    begin(store)
    lease = claim(store, 0).lease
    store.request_cancel(JOB)
    store.end_session(told(10), {})
    with pytest.raises(SessionEndedError):
        store.keep_part(lease, [completion(0)], NO_TIME, {}, Spent(SESSION, 20, SOME))
    assert list(store.completions(JOB)) == []
    begin(store, "session-2")
    store.keep_part(lease, [completion(0)], NO_TIME, {}, Spent("session-2", 20, SOME))
    assert stage_of(store) is Stage.PUBLISH
    assert [(s.attempt, s.kept) for s in slices(store)] == [(Attempt.of(lease), True)]


@pytest.mark.parametrize("seed", range(3))
def test_a_slice_keeps_the_largest_of_each_counter_and_stays_kept(store: Store, seed: int) -> None:
    """Words may come late and in any order, from a writer of results and from heartbeats."""
    chance, most = random.Random(seed), [0] * 6
    ingest(store, groups=1)
    begin(store)
    lease = claim(store, 0).lease
    for word in range(8):
        counters = [chance.randint(0, 9) for _ in range(6)]
        most = list(map(max, most, counters))
        if word == 4:
            spent = Spent(SESSION, 10, Ticks(*counters))
            store.advance(lease, Stage.RECORD, RESULTS, NO_TIME, spent)
        else:
            store.report_time(told(), {Attempt.of(lease): Ticks(*counters)})
        [found] = slices(store)
        assert (found.ticks, found.kept) == (Ticks(*most), word >= 4)


# --- what is asked for ----------------------------------------------------------------------


def test_slices_and_sessions_are_of_one_job_or_of_all(store: Store) -> None:
    begin(store)
    begin(store, "session-2", age_ticks=TICKS_PER_SEC)
    of = {index: attempt(index) for index in range(3)}
    other = of[0]._replace(job_id="job00000000000002")
    store.report_time(told(), {of[1]: SOME, of[0]: SOME, other: SOME})
    store.report_time(told(session="session-2"), {of[1]: SOME, of[2]: SOME})
    assert [s.attempt for s in slices(store)] == [of[0], of[1], of[1], of[2], other]
    assert [s.session_id for s in slices(store, job_id=JOB)] == [
        SESSION, SESSION, "session-2", "session-2",
    ]  # fmt: skip
    assert [s.attempt for s in slices(store, session_id="session-2")] == [of[1], of[2]]
    assert slices(store, job_id="nosuchjob") == []
    assert [s.session_id for s in store.sessions()] == ["session-2", SESSION]
    assert [s.session_id for s in store.sessions(other.job_id)] == [SESSION]
    assert [s.session_id for s in store.sessions(session_id="session-2")] == ["session-2"]
    assert store.sessions(other.job_id, "session-2") == []


def test_many_slices_come_a_page_at_a_time(store: Store) -> None:
    begin(store)
    many = {attempt(index, index % 3): Ticks(verify=index) for index in range(2100)}
    store.report_time(told(), many)
    assert [s.ticks.verify for s in slices(store)] == list(range(2100))


def test_threads_of_one_worker_tell_its_time_together(store: Store) -> None:
    begin(store)

    def tell(first: int) -> None:
        for step in range(1, 6):
            attempts = {attempt(index): Ticks(verify=step) for index in range(first, first + 3)}
            store.report_time(told(step * 10 + first, step), attempts)

    successes(together(*[partial(tell, first) for first in range(4)]))
    row = the_session(store)
    assert (row.seen, row.idle, row.spent) == (53, 5, 6 * 5)


def test_the_slices_of_a_job_in_sums(store: Store) -> None:
    ingest(store, groups=3)
    begin(store)
    store.begin_session(NewSession("session-2", "w2", replace(DEVICE, price_microusd=7), 0))
    kept, held, given_back = (claim(store, index).lease for index in range(3))
    hints = Attempt(JOB, 0, HINTS, Stage.PROPOSE)
    others = {Attempt.of(held): SOME, Attempt.of(given_back): SOME, hints: Ticks(verify=1)}
    store.report_time(told(), others)
    store.report_time(told(session="session-2"), {Attempt.of(held): SOME})
    advance(store, kept)
    store.release(given_back, "it broke")
    dear, cheap = DEVICE.price_microusd, 7
    assert store.job_times(JOB) == store.job_times()
    assert store.job_times("nosuchjob") == []
    assert store.job_times() == [
        JobTime(JOB, Stage.VERIFY, cheap, kept=False, in_flight=True, hints=False, ticks=SOME),
        JobTime(JOB, Stage.VERIFY, dear, kept=False, in_flight=False, hints=False, ticks=SOME),
        JobTime(
            JOB, Stage.PROPOSE, dear, kept=False, in_flight=False, hints=True, ticks=Ticks(verify=1)
        ),
        JobTime(JOB, Stage.VERIFY, dear, kept=False, in_flight=True, hints=False, ticks=SOME),
        JobTime(JOB, Stage.VERIFY, dear, kept=True, in_flight=False, hints=False, ticks=SOME),
    ]


def test_the_completions_of_a_job_in_sums(store: Store) -> None:
    ingest(store, groups=1)
    lease = verified(store, 0)
    record = replace(completion(0), ticks=SOME, price_microusd=3, ahead_ticks=9)
    record = replace(record, ahead_price_microusd=2, accepted=4, tag="news")
    untagged = replace(record, row_index=3, tag=None, price_microusd=5)
    records = [record, replace(record, sample_index=1), replace(record, row_index=1), untagged]
    store.commit_group(lease, records, NO_TIME, {})
    times = store.row_times(JOB)
    assert times == store.row_times()
    assert times == [
        RowTime(JOB, None, 5, 2, SOME, 9, 1, 1, 5, 3, 4),
        RowTime(JOB, "news", 3, 2, SOME + SOME + SOME, 27, 2, 3, 10, 9, 12),
    ]
    assert store.row_times("nosuchjob") == []


def test_a_tick_of_a_dollar_an_hour_is_a_unit_of_money() -> None:
    assert usd_of(3600 * TICKS_PER_SEC * 1_000_000) == 1.0
