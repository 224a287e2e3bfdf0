"""One test body for the three stores: in memory, SQLite and PostgreSQL.

Time is a clock that tests move, so nothing sleeps. What is true of one database only (its own
clock, lost connections, statements) is in `tests/ledger`.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, fields, replace
from functools import partial
from typing import Any

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
    START,
    Clock,
    completion,
    new_group,
    new_job,
    position,
)

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import (
    FencedError,
    IdempotencyError,
    JobNotFoundError,
    StoreError,
    UsageError,
)
from specbatch.schemas.provenance import NO_PROVENANCE, TICKS_PER_SEC, Provenance, Ticks
from specbatch.schemas.records import (
    Bell,
    CompletionRecord,
    FinishReason,
    JobState,
    Lease,
    NewJob,
    Prompts,
    RejectedRow,
    Stage,
    StageTiming,
)
from specbatch.schemas.spec import load_spec


def test_the_example_completion_leaves_no_field_at_its_default() -> None:
    """Else a store that forgets a new field would pass unnoticed."""
    defaults = {f.name: f.default for f in fields(CompletionRecord) if f.default is not MISSING}
    for name in ("recheck", "shadow_proposed", "shadow_accepted"):
        del defaults[name]  # not the store's: their sums are in the job's report
    example = completion(0, error="broken")
    assert [name for name, value in defaults.items() if getattr(example, name) == value] == []


# --- jobs -----------------------------------------------------------------------------------


def test_a_new_job_is_queued_and_can_be_read_back(store: Store) -> None:
    row, created = store.create_job(new_job(idempotency_key="k"))
    assert created
    assert (row.state, row.stage, row.created_at) == (JobState.QUEUED, Stage.INGEST, START)
    assert row == store.get_job(JOB)
    assert row.spec == new_job().spec


def test_the_same_key_and_spec_give_the_same_job(store: Store) -> None:
    first, _ = store.create_job(new_job(idempotency_key="k"))
    again, created = store.create_job(new_job("job00000000000002", idempotency_key="k"))
    assert (again, created) == (first, False)
    assert len(store.list_jobs()) == 1


def test_the_same_key_with_another_spec_names_what_differs(store: Store) -> None:
    store.create_job(new_job(idempotency_key="k"))
    other = new_job(
        "job00000000000002",
        idempotency_key="k",
        spec_digest="digest-2",
        spec={"name": "other", "sampling": {"temperature": 1.0, "n": 1}, "verifier": "big"},
    )
    with pytest.raises(IdempotencyError, match=r"differs in: name, sampling\.temperature\)"):
        store.create_job(other)


OLD_SPEC = {  # as version 0.1.0 stored one, every field with its default
    "name": "nightly", "tenant": "default", "verifier": "/big", "proposer": "/small",
    "input": {
        "uri": "/in.parquet", "format": "auto", "prompt_column": "prompt", "prompt_kind": "auto",
        "id_column": None, "seed_column": None, "tag_column": None,
    },
    "output": {"uri": "/out"},
    "sampling": {
        "max_tokens": 64, "min_tokens": 0, "temperature": 0.8, "top_p": 1.0, "top_k": 0,
        "min_p": 0.0, "seed": 0, "n": 1, "stop_token_ids": [], "ignore_eos": False,
    },
    "speculation": {"depth": "auto", "pregenerate": "auto", "pregenerate_tokens": 16},
    "engine": {"dtype": "auto", "exactness": "bitwise"},
    "group_size": 64, "max_prompt_tokens": None,
}  # fmt: skip


def _resubmitted(**sampling: Any) -> NewJob:
    spec = load_spec(
        {
            "name": "nightly",
            "input": {"uri": "/in.parquet"},
            "output": {"uri": "/out"},
            "verifier": "/big",
            "proposer": "/small",
            "sampling": {"max_tokens": 64, "temperature": 0.8, **sampling},
        }
    )
    return new_job(
        "job00000000000002",
        idempotency_key="k",
        spec=spec.model_dump(mode="json"),
        spec_digest=spec.digest(),
    )


def test_a_job_of_an_earlier_version_is_found_by_its_key(store: Store) -> None:
    old = new_job(idempotency_key="k", spec=OLD_SPEC, spec_digest="of every field there was")
    first, _ = store.create_job(old)
    assert store.create_job(_resubmitted()) == (first, False)
    with pytest.raises(IdempotencyError, match=r"differs in: sampling\.top_p\)"):
        store.create_job(_resubmitted(top_p=0.9))


def test_a_known_job_id_is_not_created_twice(store: Store) -> None:
    first, _ = store.create_job(new_job())
    assert store.create_job(new_job()) == (first, False)
    with pytest.raises(IdempotencyError, match=f"job id {JOB}"):
        store.create_job(new_job(spec_digest="digest-2"))


def test_jobs_without_a_key_are_never_the_same(store: Store) -> None:
    for number in range(3):
        assert store.create_job(new_job(f"job0000000000000{number}", idempotency_key=None))[1]
    assert store.create_job(new_job("job00000000000009", idempotency_key=""))[1]
    assert store.create_job(new_job("job00000000000008", idempotency_key=""))[1]


def test_concurrent_submissions_with_one_key_create_one_job(store: Store) -> None:
    jobs = [new_job(f"job0000000000000{n}", idempotency_key="k") for n in range(4)]
    results = successes(together(*[partial(store.create_job, job) for job in jobs]))
    assert sum(created for _, created in results) == 1
    assert len({row.job_id for row, _ in results}) == 1


def test_a_job_is_found_by_a_unique_prefix(store: Store) -> None:
    store.create_job(new_job("abcdef0000000001"))
    store.create_job(new_job("abcdefg"))
    store.create_job(new_job("abcdef"))
    assert store.get_job("abcdef00").job_id == "abcdef0000000001"
    assert store.get_job("abcdef").job_id == "abcdef"
    with pytest.raises(JobNotFoundError, match="no job"):
        store.get_job("abcde")
    with pytest.raises(JobNotFoundError, match="no job"):
        store.get_job("%bcdef")


def test_a_prefix_of_several_jobs_names_none(store: Store) -> None:
    store.create_job(new_job("abcdef01"))
    store.create_job(new_job("abcdef02"))
    with pytest.raises(JobNotFoundError, match="more than one job"):
        store.get_job("abcdef")


def test_jobs_are_listed_newest_first(store: Store, clock: Clock) -> None:
    for number in range(4):
        clock.advance(1)
        store.create_job(new_job(f"job0000000000000{number}"))
    assert [job.job_id[-1] for job in store.list_jobs(limit=3)] == ["3", "2", "1"]
    assert len(store.list_jobs(state=JobState.QUEUED)) == 4
    assert store.list_jobs(state=JobState.DONE) == []


def test_every_operation_on_an_unknown_job_says_so(store: Store) -> None:
    for call in (store.get_job, store.progress, store.request_cancel, store.retry_job):
        with pytest.raises(JobNotFoundError):
            call("nosuchjob")
    assert store.claim_job("nosuchjob", Stage.INGEST, "w", 1) is None
    assert store.claim_group("nosuchjob", 0, Stage.VERIFY, "w", 1) is None


# --- ingest ---------------------------------------------------------------------------------


def test_the_first_claim_of_ingest_starts_the_job(store: Store, clock: Clock) -> None:
    store.create_job(new_job())
    clock.advance(5)
    work = claim_job(store, Stage.INGEST)
    assert (work.next_group, work.next_row, work.cursor) == (0, 0, None)
    job = store.get_job(JOB)
    assert (job.state, job.started_at) == (JobState.RUNNING, START + 5)


def test_ingest_resumes_where_its_last_transaction_ended(store: Store, clock: Clock) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    bad = RejectedRow(3, None, "empty_prompt", "the prompt is empty")
    store.add_groups(lease, [new_group(0), new_group(1)], [bad], 9, position(9))
    clock.advance(LEASE_SEC + 1)
    work = claim_job(store, Stage.INGEST, "another")
    assert (work.next_group, work.next_row, work.cursor) == (2, 9, position(9))
    assert work.lease.generation == lease.generation + 1
    with pytest.raises(FencedError):
        store.add_groups(lease, [new_group(2)], [], 12, position(12))
    with pytest.raises(FencedError):
        store.finish_ingest(lease, 9, {})
    assert store.get_job(JOB).started_at == START


def test_groups_must_carry_on_where_the_last_ended(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(0)], [], 4, position(4))
    for wrong in ([new_group(0)], [new_group(2)], [new_group(1), new_group(1)]):
        with pytest.raises(StoreError, match="must have index 1"):
            store.add_groups(lease, wrong, [], 8, position(8))
    assert claim(store, 0).rows == 4


def test_a_failed_add_groups_leaves_nothing_behind(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    bad = RejectedRow(1, "x", "c", "r")
    store.add_groups(lease, [], [bad], 2, position(2))
    with pytest.raises(StoreError):
        store.add_groups(lease, [new_group(0)], [bad], 8, position(8))
    store.release(lease, "row twice")
    work = claim_job(store, Stage.INGEST)
    assert (work.next_group, work.next_row) == (0, 2)
    assert store.claim_group(JOB, 0, Stage.VERIFY, "w", 1) is None


def test_groups_can_be_worked_on_while_the_input_is_read(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(0)], [], 4, position(4))
    commit(store, verified(store, 0))
    assert stage_of(store) is Stage.INGEST
    store.finish_ingest(lease, 4, {"verifier_sha256": "abc", "vocab": 32000})
    job = store.get_job(JOB)
    assert (job.stage, job.rows_total, job.groups_total) == (Stage.PUBLISH, 4, 1)
    assert job.report == {"verifier_sha256": "abc", "vocab": 32000}


def test_an_empty_input_goes_straight_to_publish(store: Store) -> None:
    ingest(store, groups=0)
    assert stage_of(store) is Stage.PUBLISH


def test_ingest_that_fails_every_time_fails_the_job(store: Store) -> None:
    store.create_job(new_job())
    for attempt in range(3):
        lease = claim_job(store, Stage.INGEST).lease
        assert lease.attempt == attempt + 1
        store.release(lease, "the file is gone")
    job = store.get_job(JOB)
    assert (job.state, job.stage, job.error) == (JobState.FAILED, Stage.END, "the file is gone")
    assert store.due() == []


def test_ingest_whose_workers_vanish_fails_the_job(store: Store, clock: Clock) -> None:
    store.create_job(new_job())
    for _ in range(3):
        claim_job(store, Stage.INGEST)
        clock.advance(LEASE_SEC + 1)
    assert store.claim_job(JOB, Stage.INGEST, "w", LEASE_SEC) is None
    job = store.get_job(JOB)
    assert job.state is JobState.FAILED
    assert "vanished 3 times" in (job.error or "")


def test_progress_of_ingest_gives_it_its_attempts_back(store: Store) -> None:
    store.create_job(new_job())
    for index in range(5):
        lease = claim_job(store, Stage.INGEST).lease
        store.add_groups(lease, [new_group(index)], [], index * 4 + 4, position())
        store.release(lease, "killed")
    assert stage_of(store) is Stage.INGEST


def test_failing_a_job_takes_its_groups_away(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(0), new_group(1)], [], 8, position(8))
    held = claim(store, 0).lease
    store.fail_job(lease, "the model has no tokenizer")
    job = store.get_job(JOB)
    assert (job.state, job.error) == (JobState.FAILED, "the model has no tokenizer")
    assert job.finished_at == START
    assert store.heartbeat([held], LEASE_SEC) == ({held}, set(), set())
    with pytest.raises(FencedError):
        store.advance(held, Stage.RECORD, RESULTS, NO_TIME)
    assert [word for _, word, _, _ in store.failed_groups(JOB)] == ["cancelled", "cancelled"]
    with pytest.raises(FencedError):
        store.fail_job(lease, "again")


# --- leases ---------------------------------------------------------------------------------


def test_a_claimed_group_cannot_be_claimed_again(store: Store) -> None:
    ingest(store)
    work = claim(store, 0)
    assert work.prompts == new_group(0).prompts
    assert (work.rows, work.drafts, work.results) == (4, None, None)
    assert work.lease == Lease(JOB, 0, Stage.VERIFY, 1, "w1", 1)
    assert store.claim_group(JOB, 0, Stage.VERIFY, "w2", LEASE_SEC) is None
    assert store.claim_group(JOB, 0, Stage.VERIFY, "w1", LEASE_SEC) is None


def test_a_group_can_only_be_claimed_at_its_stage(store: Store) -> None:
    ingest(store)
    for stage in set(Stage) - {Stage.VERIFY}:
        assert store.claim_group(JOB, 0, stage, "w", LEASE_SEC) is None
    for stage in set(Stage):
        assert store.claim_job(JOB, stage, "w", LEASE_SEC) is None, "the job is at RUN"
    assert store.claim_group(JOB, 7, Stage.VERIFY, "w", LEASE_SEC) is None


def test_an_expired_lease_can_be_taken_over_and_the_old_holder_is_fenced(
    store: Store, clock: Clock
) -> None:
    ingest(store)
    old = claim(store, 0).lease
    clock.advance(LEASE_SEC - 1)
    assert store.claim_group(JOB, 0, Stage.VERIFY, "w2", LEASE_SEC) is None
    clock.advance(1)
    new = claim(store, 0, owner="w2").lease
    assert (new.generation, new.attempt) == (2, 2)
    with pytest.raises(FencedError, match="generation 1"):
        store.advance(old, Stage.RECORD, RESULTS, NO_TIME)
    with pytest.raises(FencedError):
        store.cancel_group(old)
    store.release(old, "too late")
    assert store.heartbeat([old, new], LEASE_SEC) == ({old}, set(), set())
    store.advance(new, Stage.RECORD, RESULTS, NO_TIME)


@pytest.mark.parametrize(
    "change", [{"generation": 2}, {"owner": "w2"}, {"stage": Stage.RECORD}, {"group_index": 1}]
)
def test_a_lease_must_fit_in_every_field(store: Store, change: dict[str, Any]) -> None:
    ingest(store)
    lease = replace(claim(store, 0).lease, **change)
    assert store.heartbeat([lease], LEASE_SEC) == ({lease}, set(), set())
    with pytest.raises(FencedError):
        store.cancel_group(lease)
    with pytest.raises(FencedError):
        store.commit_group(lease, [], NO_TIME, {})


def test_heartbeats_keep_leases_alive(store: Store, clock: Clock) -> None:
    ingest(store, groups=3)
    leases = [claim(store, index).lease for index in range(3)]
    for _ in range(5):
        clock.advance(LEASE_SEC - 1)
        assert store.heartbeat(leases, LEASE_SEC) == (set(), set(), set())
    assert store.due() == []
    assert store.claim_group(JOB, 0, Stage.VERIFY, "w2", LEASE_SEC) is None


def test_a_heartbeat_covers_jobs_and_many_groups(store: Store, clock: Clock) -> None:
    store.create_job(new_job())
    job_lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(job_lease, [new_group(i) for i in range(600)], [], 2400, position())
    leases = [job_lease, *(claim(store, index).lease for index in range(0, 600, 3))]
    stale = replace(leases[7], generation=9)
    clock.advance(LEASE_SEC - 1)
    assert store.heartbeat([*leases, stale], LEASE_SEC) == ({stale}, set(), set())
    assert store.heartbeat([], LEASE_SEC) == (set(), set(), set())
    clock.advance(LEASE_SEC - 1)
    assert len(store.due()) == 400


def test_a_released_group_is_ready_again_with_its_error(store: Store) -> None:
    ingest(store)
    store.release(claim(store, 0).lease, "engine restarted")
    assert claim(store, 0, owner="w2").lease.attempt == 2


def test_a_group_fails_when_its_attempts_are_used_up(store: Store) -> None:
    ingest(store)
    exhaust(store, 0)
    assert store.claim_group(JOB, 0, Stage.VERIFY, "w", LEASE_SEC) is None
    prompts = Prompts(new_group(0).prompts, 0, 4)
    assert store.failed_groups(JOB) == [(0, "failed", prompts, "out of memory 2")]
    assert stage_of(store) is Stage.RUN, "group 1 is open"
    exhaust(store, 1)
    assert stage_of(store) is Stage.PUBLISH


def test_a_row_whose_workers_vanish_fails_at_the_next_claim(store: Store, clock: Clock) -> None:
    ingest(store, groups=1, rows=1)
    for _ in range(3):
        claim(store, 0)
        clock.advance(LEASE_SEC)
    assert store.due() == [Bell(JOB, Stage.VERIFY, 0, "big")]
    assert store.claim_group(JOB, 0, Stage.VERIFY, "w", LEASE_SEC) is None
    [(_, word, _, error)] = store.failed_groups(JOB)
    assert (word, error) == (
        "failed",
        "the worker vanished 3 times while it held this work",
    )
    assert stage_of(store) is Stage.PUBLISH


def test_attempts_begin_anew_at_each_stage(store: Store) -> None:
    ingest(store, first_stage=Stage.PROPOSE)
    for stage, to, artefact in (
        (Stage.PROPOSE, Stage.VERIFY, DRAFTS),
        (Stage.VERIFY, Stage.RECORD, RESULTS),
    ):
        for _ in range(2):
            store.release(claim(store, 0, stage).lease, "once more")
        lease = claim(store, 0, stage).lease
        assert lease.attempt == 3
        store.advance(lease, to, artefact, NO_TIME)
    work = claim(store, 0, Stage.RECORD)
    assert (work.drafts, work.results, work.lease.attempt) == (DRAFTS, RESULTS, 1)


def test_a_group_that_cannot_be_proposed_for_is_verified_without_drafts(store: Store) -> None:
    ingest(store, first_stage=Stage.PROPOSE)
    exhaust(store, 0, Stage.PROPOSE)
    work = claim(store, 0, Stage.VERIFY)
    assert (work.drafts, work.lease.attempt) == (None, 1)
    assert store.failed_groups(JOB) == []


def test_a_group_whose_proposers_vanish_is_verified_without_drafts(
    store: Store, clock: Clock
) -> None:
    ingest(store, first_stage=Stage.PROPOSE)
    for _ in range(3):
        claim(store, 0, Stage.PROPOSE)
        clock.advance(LEASE_SEC)
    assert store.claim_group(JOB, 0, Stage.PROPOSE, "w", LEASE_SEC) is None
    assert claim(store, 0, Stage.VERIFY).lease.attempt == 1


def test_proposing_may_bring_nothing(store: Store) -> None:
    ingest(store, first_stage=Stage.PROPOSE)
    store.advance(claim(store, 0, Stage.PROPOSE).lease, Stage.VERIFY, None, NO_TIME)
    assert claim(store, 0).drafts is None


def test_impossible_steps_are_refused(store: Store) -> None:
    ingest(store)
    lease = claim(store, 0).lease
    for to in (Stage.PROPOSE, Stage.VERIFY, Stage.DONE, Stage.FAILED):
        with pytest.raises(ValueError, match="cannot advance"):
            store.advance(lease, to, RESULTS, NO_TIME)
    with pytest.raises(ValueError, match="results"):
        store.advance(lease, Stage.RECORD, None, NO_TIME)


def test_exactly_one_of_many_claimers_wins(store: Store) -> None:
    ingest(store, groups=5)
    for index in range(5):
        claims = together(
            *[
                partial(store.claim_group, JOB, index, Stage.VERIFY, f"w{n}", LEASE_SEC)
                for n in range(8)
            ]
        )
        assert sum(work is not None for work in successes(claims)) == 1


# --- what is due ----------------------------------------------------------------------------


def test_due_names_what_is_ready_and_who_must_serve_it(store: Store, clock: Clock) -> None:
    store.create_job(new_job())
    assert store.due() == [Bell(JOB, Stage.INGEST, None)]
    lease = claim_job(store, Stage.INGEST).lease
    assert store.due() == []
    store.add_groups(lease, [new_group(0, first_stage=Stage.PROPOSE)], [], 4, position(4))
    store.add_groups(lease, [new_group(1)], [], 8, position(8))
    assert store.due() == [
        Bell(JOB, Stage.PROPOSE, 0, "small"),
        Bell(JOB, Stage.VERIFY, 1, "big"),
    ]
    store.finish_ingest(lease, 8, {})
    held = claim(store, 1).lease
    store.advance(held, Stage.RECORD, RESULTS, NO_TIME)
    assert Bell(JOB, Stage.RECORD, 1) in store.due()
    claim(store, 1, Stage.RECORD)
    assert store.due() == [Bell(JOB, Stage.PROPOSE, 0, "small")]
    clock.advance(LEASE_SEC)
    assert len(store.due()) == 2


def test_due_gives_the_longest_ready_first(store: Store, clock: Clock) -> None:
    ingest(store, groups=3)
    clock.advance(1)
    store.release(claim(store, 0).lease, "again")
    clock.advance(1)
    store.create_job(new_job("job00000000000002"))
    bells = store.due()
    assert [bell.group_index for bell in bells] == [None, 1, 2, 0]
    assert store.due(limit=2) == bells[:2]
    assert store.due(limit=1) == bells[:1]


def test_a_finished_job_is_not_due(store: Store) -> None:
    ingest(store, groups=1)
    commit(store, verified(store, 0))
    assert store.due() == [Bell(JOB, Stage.PUBLISH, None)]
    finish(store)
    assert store.due() == []


# --- commit ---------------------------------------------------------------------------------


def test_a_committed_group_gives_its_completions_back(store: Store) -> None:
    ingest(store, groups=1)
    records = [
        completion(0, 0),
        completion(0, 1, tag=None, proposer=None, seed=0),
        completion(2, 0, token_ids=(), origins=(), logprobs=(), text="", top_logprobs=()),
        completion(3, 0, finish_reason=FinishReason.ERROR, error="too long"),
        completion(1, 0, proposed_at_depth=(), accepted_at_depth=()),
    ]
    store.commit_group(verified(store, 0), records, NO_TIME, {})
    ordered = [records[0], records[1], records[4], records[2], records[3]]
    for batch in (1, 2, 5, 1000):
        assert list(store.completions(JOB, batch=batch)) == ordered
    assert list(store.completions("nosuchjob")) == []


AWKWARD_TEXTS = [
    "nul \x00 byte",
    "tab\tnew\nline\\N\\.",
    "\x1a0000",
    "\ud800 alone",
    "🙂 é",
    "{,}\"'",
]


@pytest.mark.parametrize("text", AWKWARD_TEXTS, ids=ascii)
def test_any_text_is_kept_as_it_is(store: Store, text: str) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    bad = RejectedRow(4, text, "bad", text)
    store.add_groups(lease, [new_group(0)], [bad], 5, position(5))
    store.finish_ingest(lease, 5, {})
    record = completion(0, text=text, row_id=text, tag=text, error=text)
    store.commit_group(verified(store, 0), [record], NO_TIME, {})
    assert list(store.completions(JOB)) == [record]
    assert list(store.rejected(JOB)) == [bad]


def test_log_probabilities_are_kept_in_single_precision(store: Store) -> None:
    ingest(store, groups=1)
    record = completion(0, logprobs=(-0.1, -1e-30, -math.inf))
    store.commit_group(verified(store, 0), [record], NO_TIME, {})
    [kept] = store.completions(JOB)
    assert kept.logprobs[:2] == (-0.10000000149011612, -1.0000000031710769e-30)
    assert math.isnan(kept.logprobs[2])


def test_the_most_likely_tokens_are_kept_where_they_were_asked_for(store: Store) -> None:
    ingest(store, groups=1)
    tops = (((7, 9), (-0.5, -1.5)), ((0, 8), (-0.25, -0.25)), ((300_000, 1), (-0.1, -math.inf)))
    records = [
        completion(0, top_logprobs=tops),
        completion(1, top_logprobs=(((), ()),) * 3),  # log-probabilities, and of no other token
        completion(2, token_ids=(), origins=(), logprobs=(), text="", top_logprobs=()),
        completion(3, top_logprobs=None),
    ]
    store.commit_group(verified(store, 0), records, NO_TIME, {})
    first, *others = store.completions(JOB)
    assert others == records[1:]
    assert first.top_logprobs is not None
    assert first.top_logprobs[:2] == tops[:2]
    ids, values = first.top_logprobs[2]
    assert (ids, values[0]) == ((300_000, 1), -0.10000000149011612)
    assert math.isnan(values[1])


def test_what_other_columns_tell_comes_back_as_it_was(store: Store) -> None:
    """Depths, seconds, makers and models, told by others or differing from what they tell."""
    ingest(store, groups=1)
    ticks = Ticks(verify=2**40, draft=7)
    told = completion(
        0,
        token_ids=tuple(range(6)),
        logprobs=(-0.5,) * 6,
        origins=(0, 1, 1, 2, 1, 1),
        top_logprobs=None,
        proposed_at_depth=(2, 2, 2),
        accepted_at_depth=(2, 2, 0),
        provenance=Provenance((4, 5, 6), (7, 2**20, 2**31), ("a",), (0, 0), (3, 3), (70_000,)),
        ticks=ticks,
        compute_sec=ticks.total / TICKS_PER_SEC,
        ahead_ticks=3,
        draft_sec=3 / TICKS_PER_SEC,
    )
    plain = replace(
        told,
        origins=(0,) * 6,
        provenance=Provenance(tuple(range(9, 15)), (5,) * 6),
        proposed_at_depth=(),
        accepted_at_depth=(),
    )
    records = [
        told,
        replace(told, row_index=1, accepted_at_depth=(2, 2, 1), compute_sec=1.0, verifier="other"),
        replace(told, row_index=2, proposed_at_depth=(), draft_sec=0.0, proposer=None),
        replace(plain, row_index=3, proposer="another"),
        replace(plain, row_index=4, provenance=NO_PROVENANCE, proposed_at_depth=(1,)),
    ]
    store.commit_group(verified(store, 0), records, NO_TIME, {})
    assert list(store.completions(JOB)) == records


def test_what_no_output_tells_can_be_left_out(store: Store) -> None:
    ingest(store, groups=1)
    records = [
        completion(0),
        completion(1, top_logprobs=None),
        completion(2, token_ids=(), origins=(), logprobs=(), text="", top_logprobs=()),
    ]
    store.commit_group(verified(store, 0), records, NO_TIME, {})
    left_out: dict[str, Any] = dict.fromkeys(
        ("origins", "proposed_at_depth", "accepted_at_depth"), ()
    )
    left_out["provenance"] = NO_PROVENANCE
    assert list(store.completions(JOB, details=False)) == [
        replace(records[0], **left_out),
        replace(records[1], logprobs=(), **left_out),
        replace(records[2], **left_out),
    ]
    assert list(store.completions(JOB)) == records


def test_a_commit_tells_what_is_due_of_its_job_then(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(index) for index in range(3)], [], 12, position(12))

    def committed(index: int) -> Stage | None:
        records = [completion(index * 4)]
        return store.commit_group(verified(store, index), records, NO_TIME, {})

    assert committed(0) is None
    store.finish_ingest(lease, 12, {})
    assert [committed(1), committed(2)] == [None, Stage.PUBLISH]


def test_a_second_commit_is_refused(store: Store) -> None:
    ingest(store)
    lease = verified(store, 0)
    commit(store, lease, steps=1)
    with pytest.raises(FencedError):
        commit(store, lease, steps=1)
    assert len(list(store.completions(JOB))) == 4
    assert store.get_job(JOB).report == {"steps": 1}
    assert store.progress(JOB).completions == 4


def test_a_fenced_commit_leaves_nothing_behind(store: Store, clock: Clock) -> None:
    ingest(store)
    old = verified(store, 0)
    clock.advance(LEASE_SEC)
    new = claim(store, 0, Stage.RECORD, "w2").lease
    with pytest.raises(FencedError):
        commit(store, old, steps=5)
    assert list(store.completions(JOB)) == []
    assert store.get_job(JOB).report == {}
    commit(store, new, steps=7)
    assert len(list(store.completions(JOB))) == 4


def test_of_two_concurrent_commits_of_one_lease_one_is_refused(store: Store) -> None:
    ingest(store)
    lease = verified(store, 0)
    results = together(*[lambda: commit(store, lease, steps=1)] * 4)
    assert sum(isinstance(result, FencedError) for result in results) == 3
    assert results.count(None) == 1
    assert store.get_job(JOB).report == {"steps": 1}


def test_known_completions_are_kept_and_not_doubled(store: Store) -> None:
    ingest(store)
    commit(store, verified(store, 0))
    store.commit_group(
        verified(store, 1), [completion(0, text="other"), completion(4)], NO_TIME, {}
    )
    assert [c.row_index for c in store.completions(JOB)] == [0, 1, 2, 3, 4]
    assert next(store.completions(JOB)).text == "a b"


def test_two_last_commits_at_once_publish_once(store: Store) -> None:
    for round_number in range(6):
        job_id = f"job1000000000000{round_number}"
        store.create_job(new_job(job_id))
        ingesting = found(store.claim_job(job_id, Stage.INGEST, "i", LEASE_SEC)).lease
        store.add_groups(ingesting, [new_group(i) for i in range(4)], [], 16, position(16))
        leases = []
        for index in range(4):
            lease = found(store.claim_group(job_id, index, Stage.VERIFY, "w", LEASE_SEC)).lease
            store.advance(lease, Stage.RECORD, RESULTS, NO_TIME)
            record = found(store.claim_group(job_id, index, Stage.RECORD, "w", LEASE_SEC))
            leases.append(record.lease)
        results = together(
            *[partial(commit, store, lease, steps=1) for lease in leases],
            partial(store.finish_ingest, ingesting, 16, {}),
        )
        assert results == [None] * 5
        job = store.get_job(job_id)
        assert (job.stage, job.report) == (Stage.PUBLISH, {"steps": 4})
        claims = together(
            *[partial(store.claim_job, job_id, Stage.PUBLISH, f"p{n}", 60) for n in range(4)]
        )
        assert sum(work is not None for work in successes(claims)) == 1


def test_the_last_commit_and_the_last_failure_at_once_publish(store: Store) -> None:
    ingest(store, groups=3)
    done = verified(store, 0)
    for _ in range(2):
        store.release(claim(store, 1).lease, "broken")
    failing, stopped = claim(store, 1).lease, claim(store, 2).lease
    assert together(
        lambda: commit(store, done),
        lambda: store.release(failing, "broken", whole=True),
        lambda: store.cancel_group(stopped),
    ) == [None, None, None]
    assert stage_of(store) is Stage.PUBLISH


def test_reports_add_up_key_by_key(store: Store) -> None:
    ingest(store, groups=3)
    reports: list[dict[str, float]] = [{"steps": 1, "wall_sec": 0.5}, {"steps": 2}, {}]
    for index, report in enumerate(reports):
        commit(store, verified(store, index), **report)
    assert store.get_job(JOB).report == {"steps": 3, "wall_sec": 0.5}


def test_the_largest_of_a_report_stays_the_largest(store: Store) -> None:
    ingest(store, groups=3)
    for index, margin in enumerate((0.25, 0.5, 0.125)):
        commit(store, verified(store, index), largest_margin=margin)
    assert store.get_job(JOB).report == {"largest_margin": 0.5}


# --- progress -------------------------------------------------------------------------------


def test_progress_counts_rows_tokens_time_and_money(store: Store, clock: Clock) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    bad = [RejectedRow(12, "r", "too_long", "too long"), RejectedRow(13, None, "empty", "empty")]
    store.add_groups(lease, [new_group(i) for i in range(3)], bad, 14, position(14))
    before = store.progress(JOB)
    assert (before.rows_total, before.rows_done, before.ingest_done) == (14, 2, False)
    assert (before.cost_usd, before.acceptance_rate) == (0.0, None)
    store.finish_ingest(lease, 14, {})

    clock.advance(10)  # group 0 waits 10 s, then verifies for 3 s; records with a time of its own
    held = claim(store, 0).lease
    clock.advance(3)
    store.advance(held, Stage.RECORD, RESULTS, StageTiming(0.0, 2.5, 0.01))
    records = [completion(row) for row in range(3)]
    records.append(completion(3, finish_reason=FinishReason.ERROR, error="broken"))
    lease = claim(store, 0, Stage.RECORD).lease
    store.commit_group(lease, records, StageTiming(1.5, 0.5), {})
    exhaust(store, 1)

    assert store.progress(JOB) == replace(
        before,
        ingest_done=True,
        rows_done=2 + 4 + 4,
        rows_failed=2 + 1 + 4,
        groups_done=2,
        completions=4,
        completion_tokens=12,
        proposed=16,
        accepted=4,
        verifier_passes=8,
        queue_sec=11.5,
        compute_sec=3.0,
        cost_usd=1.0,
    )
    assert store.progress(JOB).acceptance_rate == 0.25
    assert store.get_job(JOB).prompt_tokens == before.prompt_tokens == 60
    assert store.progress(JOB[:8]).job_id == JOB


def test_waiting_counts_from_the_moment_a_lease_ran_out(store: Store, clock: Clock) -> None:
    ingest(store, groups=1)
    claim(store, 0)
    clock.advance(LEASE_SEC + 7)
    store.advance(claim(store, 0).lease, Stage.RECORD, RESULTS, NO_TIME)
    assert store.progress(JOB).queue_sec == 7.0


def test_rejected_rows_come_in_order(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    rows = [RejectedRow(n, f"id{n}", "empty", "empty") for n in (5, 3, 1002)]
    store.add_groups(lease, [], rows, 2000, position(0))
    assert [row.row_index for row in store.rejected(JOB)] == [3, 5, 1002]


def test_the_prompts_of_a_group_are_found_by_its_index(store: Store) -> None:
    ingest(store, groups=2)
    assert store.prompts_of(JOB, 1) == Prompts(new_group(1).prompts, 0, 4)
    assert store.prompts_of(JOB, 2) is None
    assert store.prompts_of("another0job", 0) is None
    assert store.prompts_of(JOB[:8], 0) is None, "by the whole id alone"


# --- publish --------------------------------------------------------------------------------


def test_a_published_job_is_final(store: Store, clock: Clock) -> None:
    ingest(store, groups=1)
    commit(store, verified(store, 0))
    clock.advance(9)
    lease = claim_job(store, Stage.PUBLISH).lease
    with pytest.raises(ValueError, match="cannot end as running"):
        store.finish_job(lease, JobState.RUNNING)
    store.finish_job(lease, JobState.DONE)
    job = store.get_job(JOB)
    assert (job.state, job.stage, job.finished_at) == (JobState.DONE, Stage.END, START + 9)
    with pytest.raises(FencedError):
        store.finish_job(lease, JobState.DONE)
    assert store.request_cancel(JOB) == job
    assert store.retry_job(JOB) == 0
    assert store.get_job(JOB) == job


def test_only_a_publish_lease_can_finish_a_job(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    with pytest.raises(FencedError):
        store.finish_job(lease, JobState.DONE)


def test_publishing_that_fails_every_time_fails_the_job_and_can_be_retried(store: Store) -> None:
    ingest(store, groups=1)
    commit(store, verified(store, 0))
    for _ in range(3):
        store.release(claim_job(store, Stage.PUBLISH).lease, "the bucket is gone")
    job = store.get_job(JOB)
    assert (job.state, job.error) == (JobState.FAILED, "the bucket is gone")
    assert store.retry_job(JOB) == 1
    job = store.get_job(JOB)
    assert (job.state, job.stage, job.error) == (JobState.RUNNING, Stage.PUBLISH, None)
    finish(store)


# --- cancel ---------------------------------------------------------------------------------


def test_cancelling_a_queued_job_sends_it_to_publish(store: Store) -> None:
    store.create_job(new_job())
    job = store.request_cancel(JOB)
    assert (job.cancel_requested, job.stage) == (True, Stage.PUBLISH)
    assert store.claim_job(JOB, Stage.INGEST, "w", LEASE_SEC) is None
    finish(store, JobState.CANCELLED)
    assert store.get_job(JOB).state is JobState.CANCELLED


def test_cancelling_keeps_finished_work_and_tells_the_holders(store: Store) -> None:
    ingest(store, groups=4, first_stage=Stage.VERIFY)
    held, recording = claim(store, 0).lease, verified(store, 1)
    waiting = claim(store, 2).lease
    store.advance(waiting, Stage.RECORD, RESULTS, NO_TIME)
    job = store.request_cancel(JOB)
    assert job.stage is Stage.RUN
    assert [(i, word) for i, word, _, _ in store.failed_groups(JOB)] == [(3, "cancelled")]
    assert store.heartbeat([held, recording], LEASE_SEC) == (set(), {JOB}, set())
    commit(store, recording)
    commit(store, claim(store, 2, Stage.RECORD).lease)
    store.cancel_group(held)
    assert stage_of(store) is Stage.PUBLISH
    with pytest.raises(FencedError):
        store.cancel_group(held)
    assert store.progress(JOB).groups_done == 2


def test_a_cancelled_group_that_is_given_back_stays_cancelled(store: Store) -> None:
    ingest(store, groups=1)
    held = claim(store, 0).lease
    store.request_cancel(JOB)
    store.release(held, "stopped")
    assert [word for _, word, _, _ in store.failed_groups(JOB)] == ["cancelled"]
    assert stage_of(store) is Stage.PUBLISH


def test_a_cancelled_group_whose_worker_vanished_is_closed_by_the_sweeper(
    store: Store, clock: Clock
) -> None:
    ingest(store, groups=1)
    claim(store, 0)
    store.request_cancel(JOB)
    clock.advance(LEASE_SEC)
    assert store.due() == [Bell(JOB, Stage.VERIFY, 0, "big")]
    assert store.claim_group(JOB, 0, Stage.VERIFY, "w", LEASE_SEC) is None
    assert stage_of(store) is Stage.PUBLISH


def test_an_expired_lease_does_not_save_a_group_from_cancel(store: Store, clock: Clock) -> None:
    ingest(store, groups=1)
    lease = claim(store, 0).lease
    clock.advance(LEASE_SEC)
    assert store.request_cancel(JOB).stage is Stage.PUBLISH
    assert store.heartbeat([lease], LEASE_SEC) == ({lease}, {JOB}, set())


def test_a_cancelled_ingest_adds_no_work_and_is_left(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(0)], [], 4, position(4))
    assert store.request_cancel(JOB).stage is Stage.INGEST
    assert store.heartbeat([lease], LEASE_SEC) == (set(), {JOB}, set())
    store.add_groups(lease, [new_group(1)], [], 8, position(8))
    assert store.due() == []
    store.release(lease, "cancelled")
    job = store.get_job(JOB)
    assert (job.stage, job.groups_total) == (Stage.PUBLISH, 2)


def test_a_cancelled_ingest_waits_for_its_held_groups(store: Store, clock: Clock) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(0)], [], 4, position(4))
    clock.advance(LEASE_SEC)
    held = claim(store, 0).lease
    job = store.request_cancel(JOB)
    assert job.stage is Stage.RUN
    assert store.claim_job(JOB, Stage.INGEST, "w", LEASE_SEC) is None
    store.cancel_group(held)
    assert stage_of(store) is Stage.PUBLISH
    assert not store.progress(JOB).ingest_done


def test_a_cancelled_ingest_whose_worker_vanished_is_left_at_the_next_claim(
    store: Store, clock: Clock
) -> None:
    store.create_job(new_job())
    claim_job(store, Stage.INGEST)
    store.request_cancel(JOB)
    clock.advance(LEASE_SEC)
    assert store.claim_job(JOB, Stage.INGEST, "w", LEASE_SEC) is None
    assert stage_of(store) is Stage.PUBLISH


# --- retry ----------------------------------------------------------------------------------


def test_only_a_job_that_has_ended_can_be_retried(store: Store) -> None:
    ingest(store)
    with pytest.raises(UsageError, match="is running; only a job that has ended"):
        store.retry_job(JOB)


def test_retry_sends_failed_and_cancelled_groups_back(store: Store) -> None:
    ingest(store, groups=5, first_stage=Stage.PROPOSE)
    store.advance(claim(store, 0, Stage.PROPOSE).lease, Stage.VERIFY, DRAFTS, NO_TIME)
    commit(store, verified(store, 0))
    store.advance(claim(store, 1, Stage.PROPOSE).lease, Stage.VERIFY, DRAFTS, NO_TIME)
    exhaust(store, 1)  # fails at verify, with drafts
    store.advance(claim(store, 2, Stage.PROPOSE).lease, Stage.VERIFY, None, NO_TIME)
    store.advance(claim(store, 2).lease, Stage.RECORD, RESULTS, NO_TIME)
    exhaust(store, 2, Stage.RECORD)  # fails at record, with results
    generation = claim(store, 3, Stage.PROPOSE).lease.generation
    store.request_cancel(JOB)  # cancels 4; 3 is held
    store.cancel_group(Lease(JOB, 3, Stage.PROPOSE, generation, "w1", 1))
    finish(store, JobState.CANCELLED)

    assert store.retry_job(JOB) == 4
    job = store.get_job(JOB)
    assert (job.state, job.stage) == (JobState.RUNNING, Stage.RUN)
    assert (job.cancel_requested, job.error, job.finished_at) == (False, None, None)
    bells = {bell.group_index: bell.stage for bell in store.due()}
    assert bells == {1: Stage.VERIFY, 2: Stage.RECORD, 3: Stage.PROPOSE, 4: Stage.PROPOSE}
    again = claim(store, 3, Stage.PROPOSE).lease
    assert (again.generation, again.attempt) == (generation + 1, 1)
    assert len(list(store.completions(JOB))) == 4


def test_retry_of_a_failed_ingest_goes_on_from_its_cursor(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(0)], [], 4, position(4))
    store.fail_job(lease, "the file changed")
    assert store.retry_job(JOB) == 2
    work = claim_job(store, Stage.INGEST)
    assert (work.next_group, work.next_row, work.cursor) == (1, 4, position(4))
    assert work.lease.attempt == 1
    store.finish_ingest(work.lease, 4, {})
    commit(store, verified(store, 0))
    finish(store)


def test_retry_of_a_cancelled_job_with_nothing_left_publishes_again(store: Store) -> None:
    ingest(store, groups=1)
    lease = verified(store, 0)
    store.request_cancel(JOB)
    commit(store, lease)
    finish(store, JobState.CANCELLED)
    assert store.retry_job(JOB) == 1
    assert stage_of(store) is Stage.PUBLISH
    finish(store)


def test_a_stopped_worker_gives_work_back_without_using_up_an_attempt(store: Store) -> None:
    ingest(store)
    for _ in range(5):
        work = claim(store, 0)
        assert work.lease.attempt == 1
        store.release(work.lease, "the worker was stopped", forgiven=True)
    assert claim(store, 0).lease.attempt == 1
