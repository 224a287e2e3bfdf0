"""Parts that are written while a job runs: who may write one, and when notes count."""

from __future__ import annotations

import pytest
from contracts.shorthand import claim, claim_job, commit, exhaust, finish, found, ingest, verified
from ledger.builders import (
    JOB,
    LEASE_SEC,
    NO_TIME,
    RESULTS,
    Clock,
    completion,
    new_group,
    new_job,
    position,
)

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import FencedError
from specbatch.schemas.records import RejectedRow, Stage
from specbatch.schemas.staging import FIRST_PLACE, PartClaim, PartPlace, StagedPart


def claimed(store: Store) -> PartClaim:
    place = found(store.next_part(JOB))
    return found(store.claim_part(JOB, place, LEASE_SEC))


def noted(store: Store, claim: PartClaim, row: int, skip: int = 1) -> StagedPart:
    then = PartPlace(claim.place.number + 1, row, skip)
    part = StagedPart(claim.place.number, claim.token, 2, 3, 1, 70, "5ha", then)
    store.note_part(claim, part)
    return part


def unrecorded(store: Store) -> tuple[str | None, int]:
    prompts, row = store.first_unrecorded(JOB)
    return (None if prompts is None else prompts.artefact.uri), row


def test_the_first_group_that_is_not_recorded_is_found_by_rows(store: Store) -> None:
    ingest(store, groups=3)
    first = [new_group(index).prompts.uri for index in range(3)]
    assert unrecorded(store) == (first[0], 12)
    commit(store, verified(store, 1))
    assert unrecorded(store)[0] == first[0]
    commit(store, verified(store, 0))
    assert unrecorded(store)[0] == first[2]
    commit(store, verified(store, 2))
    assert unrecorded(store) == (None, 12)


def test_a_half_that_was_split_off_stands_where_its_rows_do(store: Store) -> None:
    ingest(store, groups=2)
    held = claim(store, 0)
    store.split_group(held.lease, keep=2)
    store.advance(held.lease, Stage.RECORD, RESULTS, NO_TIME)
    lease = claim(store, 0, Stage.RECORD).lease
    store.commit_group(lease, [completion(row) for row in range(2)], NO_TIME, {})
    prompts, _ = store.first_unrecorded(JOB)
    assert prompts is not None
    assert (prompts.artefact, prompts.row_start) == (held.prompts, 2)


def test_a_failed_group_is_not_recorded(store: Store) -> None:
    ingest(store, groups=2, rows=1)
    exhaust(store, 0)
    assert unrecorded(store)[0] == new_group(0).prompts.uri


def test_rows_are_counted_as_far_as_they_are_needed(store: Store) -> None:
    store.create_job(new_job(JOB))
    lease = claim_job(store, Stage.INGEST).lease
    bad = [RejectedRow(row, None, "bad_id", "x") for row in (8, 9)]
    store.add_groups(lease, [new_group(0), new_group(1)], bad, 10, position(10))
    store.finish_ingest(lease, 10, {})
    commit(store, verified(store, 0))
    assert store.rows_between(JOB, 0, 10, 100) == 6
    assert store.rows_between(JOB, 2, 10, 100) == 4
    assert store.rows_between(JOB, 2, 9, 100) == 3
    assert store.rows_between(JOB, 0, 10, 5) == 5


def test_rows_of_a_range_are_read_alone(store: Store) -> None:
    ingest(store, groups=2)
    for index in range(2):
        commit(store, verified(store, index))
    rows = [one.row_index for one in store.completions(JOB, 2, first_row=3, before_row=6)]
    assert rows == [3, 4, 5]


def test_parts_follow_one_another(store: Store) -> None:
    ingest(store)
    first = claimed(store)
    assert first.place == FIRST_PLACE
    parts = [noted(store, first, row=1, skip=2)]
    assert store.next_part(JOB) == PartPlace(1, 1, 2)
    parts.append(noted(store, claimed(store), row=3))
    assert store.staged_parts(JOB) == parts


def test_one_worker_writes_a_part(store: Store, clock: Clock) -> None:
    ingest(store)
    claim = claimed(store)
    assert store.next_part(JOB) is None
    assert store.claim_part(JOB, FIRST_PLACE, LEASE_SEC) is None
    clock.advance(LEASE_SEC - 1)
    store.extend_part(claim, LEASE_SEC)
    clock.advance(LEASE_SEC - 1)
    assert store.next_part(JOB) is None
    noted(store, claim, row=1)
    assert store.claim_part(JOB, FIRST_PLACE, LEASE_SEC) is None, "the place is known by then"


def test_a_claim_that_ran_out_writes_nothing_once_another_has_it(
    store: Store, clock: Clock
) -> None:
    ingest(store)
    late = claimed(store)
    clock.advance(LEASE_SEC + 1)
    claim = claimed(store)
    assert claim.token != late.token
    with pytest.raises(FencedError):
        store.extend_part(late, LEASE_SEC)
    with pytest.raises(FencedError):
        noted(store, late, row=1)
    part = noted(store, claim, row=1)
    with pytest.raises(FencedError):
        noted(store, claim, row=2)
    assert noted(store, claim, row=1) == part, "asked again, as the answer was lost"
    assert store.staged_parts(JOB) == [part]


def test_a_part_that_is_never_finished_is_left_to_the_publication(
    store: Store, clock: Clock
) -> None:
    ingest(store)
    for _ in range(3):  # the store's most attempts
        claimed(store)
        clock.advance(LEASE_SEC + 1)
    assert store.claim_part(JOB, FIRST_PLACE, LEASE_SEC) is None


def test_parts_are_written_while_the_input_is_read(store: Store) -> None:
    store.create_job(new_job(JOB))
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(0)], [], 4, position(4))
    claimed(store)


def test_nothing_is_claimed_or_noted_once_the_job_is_published(store: Store) -> None:
    ingest(store, groups=1)
    part = noted(store, claimed(store), row=1)
    late = claimed(store)
    commit(store, verified(store, 0))
    assert store.next_part(JOB) is None
    assert store.claim_part(JOB, late.place, LEASE_SEC) is None
    for write in (lambda: store.extend_part(late, LEASE_SEC), lambda: noted(store, late, row=2)):
        with pytest.raises(FencedError):
            write()
    assert store.staged_parts(JOB) == [part]


def test_no_note_outlives_the_run_of_its_job(store: Store) -> None:
    ingest(store, groups=1)
    noted(store, claimed(store), row=1)
    late = claimed(store)
    commit(store, verified(store, 0))
    finish(store)
    assert store.staged_parts(JOB) == []
    with pytest.raises(FencedError):
        noted(store, late, row=2)


def test_a_retried_job_begins_with_its_first_part(store: Store) -> None:
    ingest(store, groups=2, rows=1)
    noted(store, claimed(store), row=1)
    late = claimed(store)
    exhaust(store, 0)
    exhaust(store, 1)
    store.fail_job(claim_job(store, Stage.PUBLISH).lease, "no room")
    assert store.retry_job(JOB)
    assert store.staged_parts(JOB) == []
    assert store.next_part(JOB) == FIRST_PLACE
    with pytest.raises(FencedError):
        noted(store, late, row=2)
