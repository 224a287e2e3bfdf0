"""Groups that are split in two: one test body for both databases."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from contracts.shorthand import (
    claim,
    claim_job,
    commit,
    exhaust,
    finish,
    found,
    ingest,
    stage_of,
    successes,
    together,
    verified,
)
from ledger.builders import (
    DRAFTS,
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

from specbatch.pipeline.ledger import split_rules
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import FencedError, StoreError, UsageError
from specbatch.schemas.records import (
    FIRST_SPLIT_INDEX,
    DueWork,
    GroupWork,
    JobState,
    Prompts,
    Stage,
)

SPLIT = FIRST_SPLIT_INDEX


def fail(store: Store, index: int, attempts: int = 3, stage: Stage = Stage.VERIFY) -> int | None:
    """Use up attempts as a poisoned row would; what the last release gave back."""
    split_off = None
    for _ in range(attempts):
        split_off = store.release(
            claim(store, index, stage).lease, "the engine fell over"
        ).split_off
    return split_off


def slices(store: Store, *indexes: int) -> list[tuple[int, int]]:
    """(first row, rows) of groups."""
    placed = [found(store.prompts_of(JOB, index)) for index in indexes]
    return [(prompts.row_start, prompts.rows) for prompts in placed]


def record(store: Store, index: int, rows: range) -> None:
    """Verify and commit these rows of a group."""
    store.advance(claim(store, index).lease, Stage.RECORD, RESULTS, NO_TIME)
    lease = claim(store, index, Stage.RECORD).lease
    store.commit_group(lease, [completion(row) for row in rows], NO_TIME, {})


# --- what workers die of --------------------------------------------------------------------


def test_a_group_whose_attempts_are_used_up_is_cut_in_halves(store: Store) -> None:
    ingest(store, groups=1, rows=5)
    assert fail(store, 0, attempts=2) is None
    assert fail(store, 0, attempts=1) == SPLIT
    assert store.failed_groups(JOB) == []
    assert slices(store, 0, SPLIT) == [(0, 3), (3, 2)]
    assert {message.group_index for message in store.due()} == {0, SPLIT}
    first = claim(store, 0)
    assert (first.rows, first.row_start, first.row_stop, first.suspect) == (3, 0, 3, True)
    assert (first.lease.token, first.lease.attempt) == (5, 3)
    second = claim(store, SPLIT, owner="w2")
    assert (second.rows, second.row_start, second.row_stop, second.suspect) == (2, 3, 5, True)
    assert (second.lease.token, second.lease.attempt) == (1, 3)
    assert second.prompts == first.prompts == new_group(0).prompts
    assert second.where == Prompts(new_group(0).prompts, 3, 2)


def test_splitting_goes_on_to_the_row_and_the_row_fails(store: Store) -> None:
    ingest(store, groups=1, rows=4)
    fail(store, 0)
    fail(store, 0, attempts=1)  # rows 0 and 1: split into single rows, with all attempts
    assert slices(store, 0, SPLIT, SPLIT + 1) == [(0, 1), (2, 2), (1, 1)]
    record(store, SPLIT, range(2, 4))
    record(store, SPLIT + 1, range(1, 2))
    assert fail(store, 0, attempts=2) is None
    assert stage_of(store) is Stage.RUN
    assert fail(store, 0, attempts=1) is None
    assert store.failed_groups(JOB) == [
        (0, "failed", Prompts(new_group(0).prompts, 0, 1), "the engine fell over")
    ]
    assert stage_of(store) is Stage.PUBLISH
    progress = store.progress(JOB)
    assert (progress.rows_done, progress.rows_failed, progress.rows_total) == (4, 1, 4)
    assert (progress.groups_done, progress.groups_total) == (3, 3)
    assert progress.prompt_tokens == store.get_job(JOB).prompt_tokens == 20
    assert store.get_job(JOB).groups_total == 3
    assert [c.row_index for c in store.completions(JOB)] == [1, 2, 3]


def test_a_group_whose_workers_vanish_is_cut_at_the_next_claim(store: Store, clock: Clock) -> None:
    ingest(store, groups=1)
    for _ in range(3):
        old = claim(store, 0).lease
        clock.advance(LEASE_SEC)
    half = claim(store, 0)
    assert (half.rows, half.lease.attempt) == (2, 3)
    assert half.lease.token == old.token + 2
    assert store.heartbeat([old], LEASE_SEC).lost == {old}
    with pytest.raises(FencedError):
        store.advance(old, Stage.RECORD, RESULTS, NO_TIME)
    assert store.due() == [DueWork(JOB, Stage.VERIFY, SPLIT, "big")]
    store.release(half.lease, "it is one of these")
    assert slices(store, 0, SPLIT, SPLIT + 1) == [(0, 1), (2, 2), (1, 1)]


def test_halves_keep_the_drafts_and_go_back_to_verify(store: Store) -> None:
    ingest(store, groups=1, first_stage=Stage.PROPOSE)
    store.advance(claim(store, 0, Stage.PROPOSE).lease, Stage.VERIFY, DRAFTS, NO_TIME)
    fail(store, 0)
    assert claim(store, 0).drafts == claim(store, SPLIT, owner="w2").drafts == DRAFTS


def test_what_cannot_be_recorded_is_cut_with_its_results(store: Store) -> None:
    ingest(store, groups=1, rows=2)
    store.advance(claim(store, 0).lease, Stage.RECORD, RESULTS, NO_TIME)
    assert fail(store, 0, stage=Stage.RECORD) == SPLIT
    other = claim(store, SPLIT, Stage.RECORD)
    assert (other.results, other.rows, other.row_start) == (RESULTS, 1, 1)
    store.commit_group(other.lease, [completion(1)], NO_TIME, {})
    fail(store, 0, stage=Stage.RECORD)
    assert [(index, word) for index, word, *_ in store.failed_groups(JOB)] == [(0, "failed")]
    finish(store, JobState.PARTIAL)
    assert store.retry_job(JOB, quarantined=True) == 1
    assert claim(store, 0, Stage.RECORD).results == RESULTS


def test_a_failure_that_is_no_rows_fault_fails_the_group_whole(store: Store) -> None:
    ingest(store, groups=1)
    exhaust(store, 0)
    assert [prompts.rows for _, _, prompts, _ in store.failed_groups(JOB)] == [4]
    assert store.get_job(JOB).groups_total == 1


def test_what_fails_row_after_row_is_split_up_to_a_limit(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_rules, "MOST_FAILED_HALVES", 2)
    ingest(store, groups=3)
    assert [fail(store, index) for index in range(3)] == [SPLIT, SPLIT + 1, None]
    assert [(index, prompts.rows) for index, _, prompts, _ in store.failed_groups(JOB)] == [(2, 4)]


def test_what_the_idle_took_over_does_not_count_against_what_fails(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_rules, "MOST_FAILED_HALVES", 1)
    ingest(store, groups=2)
    lease = claim(store, 1, owner="busy").lease
    for keep in (3, 2):
        store.split_group(lease, keep)
    assert fail(store, 0) == SPLIT + 2


def test_a_cancelled_group_is_not_cut(store: Store) -> None:
    ingest(store, groups=2)
    fail(store, 0, 2)
    held = claim(store, 0).lease
    store.advance(claim(store, 1, owner="w2").lease, Stage.RECORD, RESULTS, NO_TIME)
    fail(store, 1, 2, Stage.RECORD)
    recording = claim(store, 1, Stage.RECORD).lease
    store.request_cancel(JOB)
    assert store.release(held, "stopped") == (True, None)
    assert store.release(recording, "broken") == (True, None)
    assert [(i, word) for i, word, *_ in store.failed_groups(JOB)] == [
        (0, "cancelled"),
        (1, "failed"),
    ]


def test_a_group_of_which_some_rows_were_kept_fails_whole(store: Store) -> None:
    """Which of them are in which half only a worker could tell."""
    ingest(store, groups=1)
    lease = claim(store, 0).lease
    store.request_cancel(JOB)
    store.keep_part(lease, [completion(2)], NO_TIME, {})
    finish(store, JobState.CANCELLED)
    assert store.retry_job(JOB) == 1
    assert fail(store, 0) is None
    assert [(word, p.rows) for _, word, p, _ in store.failed_groups(JOB)] == [("failed", 4)]
    progress = store.progress(JOB)
    assert (progress.groups_total, progress.completions) == (1, 1)


def test_ingest_goes_on_numbering_while_groups_are_cut(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(0)], [], 4, position(4))
    fail(store, 0)
    store.add_groups(lease, [new_group(1)], [], 8, position(8))
    fail(store, 1)
    assert slices(store, 0, 1, SPLIT, SPLIT + 1) == [(0, 2), (0, 2), (2, 2), (2, 2)]
    with pytest.raises(StoreError, match="must have index 2"):
        store.add_groups(lease, [new_group(4)], [], 12, position(12))
    store.release(lease, "interrupted")
    work = claim_job(store, Stage.INGEST)
    assert (work.next_group, work.next_row) == (2, 8)
    store.finish_ingest(work.lease, 8, {})
    assert store.progress(JOB).groups_total == 4
    assert store.progress(JOB).prompt_tokens == 40


# --- one suspect at a time ------------------------------------------------------------------


def test_an_owner_holds_one_suspect_at_a_time(store: Store, clock: Clock) -> None:
    ingest(store, groups=2)
    fail(store, 0)
    suspect = claim(store, 0).lease
    assert store.claim_group(JOB, SPLIT, Stage.VERIFY, "w1", LEASE_SEC) is None
    assert claim(store, 1).suspect is False, "this one is new"
    other = claim(store, SPLIT, owner="w2")
    store.release(other.lease, "stopped", forgiven=True)
    store.advance(suspect, Stage.RECORD, RESULTS, NO_TIME)
    again = claim(store, SPLIT)
    assert (again.suspect, again.lease.attempt) == (True, 3)
    clock.advance(LEASE_SEC)  # its holder is gone: w1 may have another one
    assert claim(store, SPLIT).rows == 1, "the last attempt was used up, and this is half of it"


def test_a_row_of_what_failed_is_tried_alone_each_time(store: Store) -> None:
    ingest(store, groups=1, rows=2)
    fail(store, 0)
    first = claim(store, 0)
    assert (first.rows, first.lease.attempt, first.suspect) == (1, 1, True)
    assert store.claim_group(JOB, SPLIT, Stage.VERIFY, "w1", LEASE_SEC) is None
    store.release(first.lease, "again")
    assert claim(store, SPLIT).suspect


def test_of_rows_that_a_worker_dies_of_only_the_poisoned_one_fails(
    store: Store, clock: Clock
) -> None:
    """A worker that takes all it gets, and dies with all of it when it has row 5."""
    ingest(store, groups=3, rows=8)
    poisoned = 5  # of group 1
    done: set[int] = set()
    for life in range(60):
        held: list[tuple[int, GroupWork]] = []
        for message in store.due():
            index, owner = message.group_index, f"worker {life}"
            if index is None or message.stage is not Stage.VERIFY:
                continue
            work = store.claim_group(JOB, index, Stage.VERIFY, owner, LEASE_SEC)
            if work is not None:
                held.append((index, work))
        rows = {index: range(work.row_start, work.row_start + work.rows) for index, work in held}
        poison = new_group(1).prompts
        if any(work.prompts == poison and poisoned in rows[index] for index, work in held):
            clock.advance(LEASE_SEC)
            continue
        for index, work in held:
            first = 8 * int(work.prompts.uri.split("-")[-1].split(".")[0])
            store.advance(work.lease, Stage.RECORD, RESULTS, NO_TIME)
            lease = claim(store, index, Stage.RECORD).lease
            mine = [completion(first + row) for row in rows[index]]
            store.commit_group(lease, mine, NO_TIME, {})
            done |= {record.row_index for record in mine}
        if stage_of(store) is Stage.PUBLISH:
            break
    assert done == set(range(24)) - {8 + poisoned}
    assert [(word, prompts) for _, word, prompts, _ in store.failed_groups(JOB)] == [
        ("failed", Prompts(poison, poisoned, 1))
    ]


# --- quarantine -----------------------------------------------------------------------------


def test_only_quarantined_rows_are_retried_where_only_they_are_asked_for(store: Store) -> None:
    ingest(store, groups=3, rows=2)
    fail(store, 0)
    record(store, 0, range(1))
    fail(store, SPLIT)  # a row that fails by itself
    exhaust(store, 1)  # a group that failed whole
    commit_two = claim(store, 2).lease
    store.request_cancel(JOB)
    store.cancel_group(commit_two)
    finish(store, JobState.PARTIAL)
    assert store.retry_job(JOB, quarantined=True) == 1
    job = store.get_job(JOB)
    assert (job.state, job.stage, job.cancel_requested) == (JobState.RUNNING, Stage.RUN, False)
    assert store.due() == [DueWork(JOB, Stage.VERIFY, SPLIT, "big")]
    work = claim(store, SPLIT)
    assert (work.lease.attempt, work.suspect, work.rows) == (1, False, 1)
    store.advance(work.lease, Stage.RECORD, RESULTS, NO_TIME)
    store.commit_group(claim(store, SPLIT, Stage.RECORD).lease, [completion(1)], NO_TIME, {})
    assert stage_of(store) is Stage.PUBLISH
    finish(store, JobState.PARTIAL)
    assert store.retry_job(JOB, quarantined=True) == 0
    assert store.get_job(JOB).state is JobState.PARTIAL
    assert store.retry_job(JOB) == 2


def test_a_failed_job_without_quarantined_rows_stays_as_it_is(store: Store) -> None:
    ingest(store, groups=1)
    exhaust(store, 0)
    finish(store, JobState.FAILED)
    before = store.get_job(JOB)
    assert store.retry_job(JOB, quarantined=True) == 0
    assert store.get_job(JOB) == before


def test_quarantined_rows_of_an_unread_input_are_not_retried_alone(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(0, rows=1)], [], 1, position(1))
    fail(store, 0)
    store.fail_job(lease, "the file changed")
    with pytest.raises(UsageError, match="not read to its end"):
        store.retry_job(JOB, quarantined=True)
    assert store.retry_job(JOB) == 2
    with pytest.raises(UsageError, match="only a job that has ended"):
        store.retry_job(JOB, quarantined=True)


def test_all_of_a_cut_group_can_be_cancelled_and_retried(store: Store) -> None:
    ingest(store, groups=1)
    fail(store, 0)
    store.request_cancel(JOB)
    assert [(i, w, p.rows) for i, w, p, _ in store.failed_groups(JOB)] == [
        (0, "cancelled", 2),
        (SPLIT, "cancelled", 2),
    ]
    finish(store, JobState.CANCELLED)
    assert store.retry_job(JOB) == 2
    assert [claim(store, i).lease.attempt for i in (0, SPLIT)] == [1, 1]


# --- what the idle take over ----------------------------------------------------------------


def test_a_holder_gives_its_last_rows_back_and_keeps_its_lease(store: Store) -> None:
    ingest(store, groups=1, rows=8)
    lease = claim(store, 0).lease
    assert store.split_group(lease, 5) == SPLIT
    assert slices(store, 0, SPLIT) == [(0, 5), (5, 3)]
    given = claim(store, SPLIT, owner="w2")
    assert (given.rows, given.lease.attempt, given.suspect) == (3, 1, False)
    assert store.heartbeat([lease], LEASE_SEC) == (set(), set(), set())
    assert store.split_group(lease, 2) == SPLIT + 1
    assert slices(store, 0, SPLIT, SPLIT + 1) == [(0, 2), (5, 3), (2, 3)]
    for wrong in (0, 2, 3):
        with pytest.raises(ValueError, match="cannot be split"):
            store.split_group(lease, wrong)
    store.advance(lease, Stage.RECORD, RESULTS, NO_TIME)
    work = claim(store, 0, Stage.RECORD)
    assert (work.rows, work.row_stop) == (2, 2)
    progress = store.progress(JOB)
    assert (progress.groups_total, progress.prompt_tokens) == (3, 40)


def test_only_a_current_lease_at_verify_can_give_rows_back(store: Store, clock: Clock) -> None:
    ingest(store, groups=2)
    old = claim(store, 0).lease
    clock.advance(LEASE_SEC)
    claim(store, 0, owner="w2")
    recording = verified(store, 1)
    for lease in (old, recording, replace(recording, job_id="nosuchjob")):
        with pytest.raises(FencedError):
            store.split_group(lease, 2)
    assert store.get_job(JOB).groups_total == 2


def test_the_idle_ask_for_the_largest_group_and_of_these_for_the_one_claimed_last(
    store: Store, clock: Clock
) -> None:
    ingest(store, groups=4)
    leases = []
    for index in (2, 0, 1):
        leases.append(claim(store, index, owner="busy").lease)
        clock.advance(1)
    assert store.ask_for_split("big", "idle") is None, "group 3 is due"
    mine = claim(store, 3, owner="idle").lease
    store.split_group(leases[2], 3)  # group 1: 3 rows are left
    taken = claim(store, SPLIT, owner="idle").lease
    assert store.ask_for_split("another", "idle") is None
    assert store.ask_for_split("big", "idle") == (JOB, 0)
    assert store.ask_for_split("big", "idle") == (JOB, 2)
    assert store.ask_for_split("big", "idle") == (JOB, 1)
    assert store.ask_for_split("big", "idle") is None, "all are asked"
    everything = [*leases, mine, taken]
    assert store.heartbeat(everything, LEASE_SEC) == (set(), set(), set(leases))
    store.split_group(leases[1], 2)
    assert store.heartbeat(everything, LEASE_SEC).split_wanted == {leases[0], leases[2]}
    assert store.ask_for_split("big", "idle") is None, "what was given back is due"
    claim(store, SPLIT + 1, owner="idle")
    assert store.ask_for_split("big", "idle") == (JOB, 0), "it may be asked again"


def test_a_new_claim_knows_nothing_of_what_the_last_holder_was_asked(
    store: Store, clock: Clock
) -> None:
    ingest(store, groups=1)
    claim(store, 0, owner="busy")
    assert store.ask_for_split("big", "idle") == (JOB, 0)
    clock.advance(LEASE_SEC)
    lease = claim(store, 0, owner="w2").lease
    assert store.heartbeat([lease], LEASE_SEC).split_wanted == set()
    assert store.ask_for_split("big", "idle") == (JOB, 0)


@pytest.mark.parametrize("why", ["read", "drafted", "cancelled", "one row", "recorded"])
def test_nobody_is_asked_where_there_is_nothing_to_share(store: Store, why: str) -> None:
    store.create_job(new_job())
    ingesting = claim_job(store, Stage.INGEST).lease
    rows = 1 if why == "one row" else 4
    store.add_groups(ingesting, [new_group(0, rows)], [], rows, position(4))
    if why == "drafted":
        more = [new_group(1, first_stage=Stage.PROPOSE)]
        store.add_groups(ingesting, more, [], 8, position(8))
    if why != "read":
        store.finish_ingest(ingesting, 8, {})
    lease = claim(store, 0, owner="busy").lease
    if why == "cancelled":
        store.request_cancel(JOB)
    if why == "recorded":
        store.advance(lease, Stage.RECORD, RESULTS, NO_TIME)
        claim(store, 0, Stage.RECORD, owner="busy")
    assert store.ask_for_split("big", "idle") is None


def test_of_cuts_at_once_each_gets_an_index_of_its_own(store: Store) -> None:
    ingest(store, groups=4, rows=8)
    leases = [claim(store, index, owner=f"w{index}").lease for index in range(4)]
    splits = [partial(store.split_group, lease, 4) for lease in leases]
    assert sorted(successes(together(*splits))) == [SPLIT + n for n in range(4)]
    assert store.progress(JOB).groups_total == 8


def test_a_lease_cut_and_committed_at_once_is_one_of_both_orders(store: Store) -> None:
    ingest(store, groups=1, rows=8)
    lease = claim(store, 0).lease
    given, left = together(
        lambda: store.split_group(lease, 4),
        lambda: store.advance(lease, Stage.RECORD, RESULTS, NO_TIME),
    )
    assert left is None
    if isinstance(given, FencedError):
        assert slices(store, 0) == [(0, 8)]
    else:
        assert slices(store, 0, SPLIT) == [(0, 4), (4, 4)]
    commit(store, claim(store, 0, Stage.RECORD).lease)
