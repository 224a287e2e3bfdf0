"""Notifications on both databases: queued with the event, taken by one sender at a time."""

from __future__ import annotations

from functools import partial

import pytest
from contracts.shorthand import (
    claim_job,
    commit,
    finish,
    ingest,
    successes,
    together,
    verified,
)
from ledger.builders import JOB, Clock, new_job

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.schemas import lineage
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.notifications import Due, Event
from specbatch.schemas.records import JobState, Stage

SPEC = {**new_job().spec, "notify": ["ops", "team"]}


def ended(store: Store, state: JobState = JobState.DONE) -> None:
    ingest(store, groups=1, spec=SPEC)
    commit(store, verified(store, 0))
    finish(store, state)


def due(store: Store, *targets: str) -> list[Due]:
    return store.due_notifications(targets or ("ops", "team"))


@pytest.mark.parametrize("state", [JobState.DONE, JobState.PARTIAL, JobState.CANCELLED])
def test_a_publication_is_queued_once_for_each_target(store: Store, state: JobState) -> None:
    ended(store, state)
    found = due(store)
    number = store.log_head(JOB).number
    assert sorted(one.target for one in found) == ["ops", "team"]
    assert {(one.event, one.number, one.attempts) for one in found} == {
        (Event(state.value), number, 0)
    }
    assert {one.event_id for one in found} == {f"{JOB}-{number}"}


def test_a_job_that_failed_tells_too(store: Store) -> None:
    store.create_job(new_job(spec=SPEC))
    store.fail_job(claim_job(store, Stage.INGEST).lease, "its input is gone")
    assert {one.event for one in due(store)} == {Event.FAILED}


def test_a_job_without_targets_queues_nothing(store: Store) -> None:
    ingest(store, groups=1)
    commit(store, verified(store, 0))
    finish(store)
    assert due(store) == []
    assert store.notifications_of(JOB) == []


def test_a_limit_is_told_of_when_it_is_reached_and_a_users_cancel_is_not(store: Store) -> None:
    ingest(store, groups=1, spec=SPEC)
    store.request_cancel(JOB)
    assert due(store) == []
    store.request_cancel(JOB, "its budget is spent", EntryKind.STOPPED)
    assert {one.event for one in due(store)} == {Event.STOPPED}


def test_a_target_that_nobody_here_knows_waits(store: Store) -> None:
    ended(store)
    assert due(store, "others") == []
    assert [one.target for one in due(store, "team", "others")] == ["team"]
    assert store.due_notifications(["team"], job_id="another") == []


def test_one_sender_has_it_for_a_while_and_then_another(store: Store, clock: Clock) -> None:
    ended(store)
    one = due(store, "ops")[0]
    assert store.take_notification(one, 60.0)
    assert not store.take_notification(one, 60.0)
    assert due(store, "ops") == []
    clock.advance(61.0)
    again = due(store, "ops")[0]
    assert again.attempts == 1
    assert not store.take_notification(one, 60.0), "it was seen before somebody took it"
    assert store.take_notification(again, 60.0)


def test_of_many_senders_one_takes_it(store: Store) -> None:
    ended(store)
    one = due(store, "ops")[0]
    taken = successes(together(*[partial(store.take_notification, one, 60.0)] * 6))
    assert sorted(taken) == [False] * 5 + [True]


def test_what_was_sent_is_not_due_again_and_the_other_target_is(store: Store, clock: Clock) -> None:
    ended(store)
    one = due(store, "ops")[0]
    store.take_notification(one, 60.0)
    store.note_sent(one)
    clock.advance(1e6)
    assert [left.target for left in due(store)] == ["team"]
    ops, team = store.notifications_of(JOB)
    assert (ops.attempts, ops.due_at, ops.error) == (1, None, None)
    assert ops.sent_at is not None
    assert (team.attempts, team.sent_at) == (0, None)


def test_what_failed_is_due_later_until_it_is_given_up(store: Store, clock: Clock) -> None:
    ended(store)
    one = due(store, "ops")[0]
    store.take_notification(one, 60.0)
    store.note_not_sent(one, "status 500 of https://u:secret@host/x", 5.0)
    assert due(store, "ops") == []
    clock.advance(6.0)
    again = due(store, "ops")[0]
    store.take_notification(again, 60.0)
    store.note_not_sent(again, "status 500", None)
    clock.advance(1e6)
    assert due(store, "ops") == []
    ops, _ = store.notifications_of(JOB)
    assert (ops.attempts, ops.due_at, ops.sent_at, ops.error) == (2, None, None, "status 500")


def test_what_is_put_off_may_be_taken_early_and_its_error_is_gone_then(store: Store) -> None:
    ended(store)
    one = due(store, "ops")[0]
    store.take_notification(one, 60.0)
    store.note_not_sent(one, "status 500", 5.0)
    assert not store.take_notification(one, 60.0), "it was seen before that attempt"
    again = one._replace(attempts=1)
    assert store.take_notification(again, 60.0)
    assert not store.take_notification(one._replace(attempts=2), 60.0), "it is being sent"
    ops, _ = store.notifications_of(JOB)
    assert (ops.attempts, ops.error) == (2, None)
    store.note_not_sent(again, "status 500", None)
    assert not store.take_notification(one._replace(attempts=2), 60.0), "it was given up"


def test_an_error_after_it_was_sent_by_another_changes_nothing(store: Store) -> None:
    ended(store)
    one = due(store, "ops")[0]
    store.note_sent(one)
    store.note_not_sent(one, "no answer in time", 5.0)
    ops, _ = store.notifications_of(JOB)
    assert (ops.due_at, ops.error) == (None, None)


def test_a_retry_ends_with_a_notification_of_its_own(store: Store) -> None:
    ended(store, JobState.CANCELLED)
    first = due(store, "ops")[0]
    store.note_sent(first)
    assert store.retry_job(JOB)
    finish(store)
    second = due(store, "ops")[0]
    assert second.event is Event.DONE
    assert second.event_id != first.event_id


def test_lineage_is_queued_once_with_the_input_and_with_each_end(url: str, clock: Clock) -> None:
    store = open_store(url, clock=clock, lineage=True)
    store.create_job(new_job(spec=SPEC))
    for _ in range(2):  # a reading that pauses is claimed again
        lease = claim_job(store, Stage.INGEST).lease
        store.note_report(lease, {lineage.INPUT: {"files": 1}})
        store.note_report(lease, {"other": 1})
        store.release(lease, "paused", forgiven=True)
    store.fail_job(claim_job(store, Stage.INGEST).lease, "its input is gone")
    rows = [row for row in store.notifications_of(JOB) if row.target == lineage.TARGET]
    assert [(row.number, row.event) for row in rows] == [
        (0, Event.STARTED),
        (store.log_head(JOB).number, Event.FAILED),
    ]
    assert len(due(store, lineage.TARGET)) == 2
    assert len(due(store)) == 2, "the job's own targets hear of the end alone"
    store.close()


def test_without_lineage_none_is_queued(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.note_report(lease, {"other": 1})
    store.fail_job(lease, "its input is gone")
    assert store.notifications_of(JOB) == []
