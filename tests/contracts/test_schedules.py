"""Times of schedules, with one test body for both databases."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from contracts.shorthand import successes, together
from ledger.builders import START, Clock

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.schedules import RUN_LEASE_SEC, RUNS, RunState, ScheduleRun

NIGHT = 86_400.0


def run(
    at: float = START,
    state: RunState = RunState.SUBMITTED,
    schedule: str = "nightly",
    **values: Any,
) -> ScheduleRun:
    return ScheduleRun(schedule, at, state, **values)


def test_a_run_comes_back_with_every_field(store: Store, clock: Clock) -> None:
    clock.advance(7.25)
    assert store.note_schedule_run(run(job_id="job1", reason="caught up \x00"))
    assert store.schedule_runs() == [
        ScheduleRun("nightly", START, RunState.SUBMITTED, "job1", "caught up \x00", START + 7.25)
    ]


def test_a_time_is_noted_once(store: Store, clock: Clock) -> None:
    assert store.note_schedule_run(run(state=RunState.MISSED, reason="first"))
    clock.advance(1)
    for state in RunState:
        assert not store.note_schedule_run(run(state=state, reason="second"))
    (kept,) = store.schedule_runs()
    assert (kept.state, kept.reason, kept.noted_at) == (RunState.MISSED, "first", START)
    assert store.note_schedule_run(run(START + NIGHT))
    assert store.note_schedule_run(run(schedule="hourly"))


def test_only_a_state_that_may_be_replaced_is(store: Store, clock: Clock) -> None:
    store.note_schedule_run(run(state=RunState.QUEUED, reason="waits"))
    done = run(job_id="job1")
    assert not store.note_schedule_run(done, replaces={RunState.MISSED, RunState.SKIPPED})
    clock.advance(3)
    assert store.note_schedule_run(done, replaces={RunState.MISSED, RunState.QUEUED})
    assert not store.note_schedule_run(run(state=RunState.SKIPPED), replaces={RunState.QUEUED})
    (kept,) = store.schedule_runs()
    assert (kept.state, kept.job_id, kept.reason) == (RunState.SUBMITTED, "job1", None)
    assert kept.noted_at == START + 3


def test_the_newest_come_first_and_of_one_time_by_name(store: Store) -> None:
    for at in (START + 2 * NIGHT, START, START + NIGHT):
        for schedule in ("nightly", "Hourly"):
            store.note_schedule_run(run(at, schedule=schedule))
    assert [(r.logical_at - START, r.schedule) for r in store.schedule_runs(limit=3)] == [
        (2 * NIGHT, "Hourly"),
        (2 * NIGHT, "nightly"),
        (NIGHT, "Hourly"),
    ]
    of_one = store.schedule_runs("nightly", limit=2)
    assert [r.logical_at for r in of_one] == [START + 2 * NIGHT, START + NIGHT]
    assert store.schedule_runs("NIGHTLY") == []
    assert [r.schedule for r in store.schedule_runs(logical_at=START)] == ["Hourly", "nightly"]
    assert len(store.schedule_runs("nightly", logical_at=START)) == 1


def test_those_that_were_noted_last_come_first_if_asked_for_so(store: Store, clock: Clock) -> None:
    for night in (3, 1, 4):
        store.note_schedule_run(run(START + night * NIGHT, RunState.QUEUED))
        clock.advance(1)
    store.note_schedule_run(run(START + 3 * NIGHT), replaces={RunState.QUEUED})
    store.note_schedule_run(run(START + 4 * NIGHT, schedule="hourly"))
    lately = store.schedule_runs("nightly", limit=2, by_noted=True)
    assert [(r.logical_at - START) / NIGHT for r in lately] == [3, 4]
    of_one_moment = store.schedule_runs(limit=2, by_noted=True)
    assert [r.schedule for r in of_one_moment] == ["hourly", "nightly"]


def test_runs_are_asked_for_up_to_a_time(store: Store) -> None:
    for night in range(4):
        store.note_schedule_run(run(START + night * NIGHT))
    for upto, newest in ((START - 1, []), (START, [0]), (START + 2.5 * NIGHT, [2])):
        found = store.schedule_runs("nightly", limit=1, upto=upto)
        assert [(r.logical_at - START) / NIGHT for r in found] == newest


def test_runs_are_asked_for_by_state(store: Store) -> None:
    for number, state in enumerate(RunState):
        store.note_schedule_run(run(START + number, state))
    assert {r.state for r in store.schedule_runs()} == RUNS
    for state in RunState:
        assert [r.state for r in store.schedule_runs(states={state})] == [state]
    assert store.schedule_runs(states=set()) == []


def test_of_many_who_note_a_time_one_does(store: Store) -> None:
    def note(job_id: str) -> list[float]:
        times = [START + n * NIGHT for n in range(10)]
        return [at for at in times if store.note_schedule_run(run(at, job_id=job_id))]

    noted = successes(together(*[partial(note, f"job{n}") for n in range(4)]))
    assert sorted(at for times in noted for at in times) == [START + n * NIGHT for n in range(10)]


def test_of_many_who_replace_a_row_one_does(store: Store) -> None:
    store.note_schedule_run(run(state=RunState.QUEUED))

    def replace(job_id: str) -> bool:
        return store.note_schedule_run(run(job_id=job_id), replaces={RunState.QUEUED})

    done = successes(together(*[partial(replace, f"job{n}") for n in range(4)]))
    assert sorted(done) == [False, False, False, True]


def test_several_are_noted_together_and_each_once(store: Store) -> None:
    first = [run(START + n * NIGHT, RunState.QUEUED) for n in (2, 0)]
    assert store.note_schedule_runs(first) == first[::-1]
    more = [run(START + n * NIGHT, RunState.MISSED) for n in range(4)]
    assert store.note_schedule_runs(more) == [more[1], more[3]]
    assert store.note_schedule_runs(more) == []
    assert store.note_schedule_runs([]) == []


def test_together_is_all_of_them_or_none(store: Store) -> None:
    runs = [run(START + n * NIGHT) for n in range(20)]
    noted = successes(together(*[partial(store.note_schedule_runs, runs) for _ in range(4)]))
    assert sorted(map(len, noted)) == [0, 0, 0, 20]


def test_what_waits_is_passed_by_only_with_something_that_is_noted(store: Store) -> None:
    waiting = [run(START + n * NIGHT, RunState.QUEUED) for n in range(2)]
    done, newer = run(START - NIGHT, job_id="job1"), run(START + 2 * NIGHT, RunState.QUEUED)
    store.note_schedule_runs([done, *waiting])
    then = [run(r.logical_at, RunState.SKIPPED, reason="late") for r in (*waiting, done)]
    assert store.note_schedule_runs(waiting, then) == []
    assert {r.state for r in store.schedule_runs()} == {RunState.QUEUED, RunState.SUBMITTED}
    assert store.note_schedule_runs([newer], then) == [newer, *then[:2]]
    assert [r.state for r in store.schedule_runs()] == [
        RunState.QUEUED,
        RunState.SKIPPED,
        RunState.SKIPPED,
        RunState.SUBMITTED,
    ]


def test_what_a_run_found_comes_back_and_only_the_newest_attempt_may_write(
    store: Store, clock: Clock
) -> None:
    store.note_schedule_run(run(state=RunState.QUEUED, reason="caught up"))
    first = store.claim_schedule_run(run())
    assert first == run(
        state=RunState.RUNNING, reason="caught up", attempts=1, started_at=START, noted_at=START
    )
    clock.advance(RUN_LEASE_SEC)
    assert store.claim_schedule_run(run()) is None, "its lease is not over"
    assert store.hold_schedule_run(first)
    clock.advance(RUN_LEASE_SEC + 0.5)
    second = store.claim_schedule_run(run())
    assert second is not None
    assert not store.hold_schedule_run(replace(first, state=RunState.DONE))
    found = {"slow_falls": [[None, "ngram", True]]}
    assert store.hold_schedule_run(replace(second, state=RunState.DONE, found=found))
    (kept,) = store.schedule_runs()
    assert (kept.state, kept.attempts, kept.found) == (RunState.DONE, 2, found)
    assert not store.hold_schedule_run(second), "it has ended"
    assert store.claim_schedule_run(run()) is None
    assert store.figures().slow_falls == {(None, "ngram"): True}


def test_of_several_who_claim_a_time_one_has_it(store: Store) -> None:
    store.note_schedule_run(run(state=RunState.QUEUED))
    claims = successes(together(*[partial(store.claim_schedule_run, run())] * 8))
    assert len([one for one in claims if one is not None]) == 1
