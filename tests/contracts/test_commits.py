"""What is kept of a group, and how far a job is: one test body for both databases."""

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
from specbatch.schemas.errors import (
    FencedError,
)
from specbatch.schemas.provenance import NO_PROVENANCE, TICKS_PER_SEC, Provenance, Ticks
from specbatch.schemas.records import (
    CompletionRecord,
    FinishReason,
    JobState,
    Prompts,
    RejectedRow,
    Released,
    Stage,
    StageTiming,
)


def test_the_example_completion_leaves_no_field_at_its_default() -> None:
    """Else a store that forgets a new field would pass unnoticed."""
    defaults = {f.name: f.default for f in fields(CompletionRecord) if f.default is not MISSING}
    for name in ("recheck", "shadow_proposed", "shadow_accepted", "rulings"):
        del defaults[name]  # not the store's: sums are in the job's report, verdicts in the log
    example = completion(0, error="broken")
    assert [name for name, value in defaults.items() if getattr(example, name) == value] == []


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
    ) == [None, Released(was_held=True), None]
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

    clock.advance(10)  # group 0 waits 10 s, then verifies for 3 s
    held = claim(store, 0).lease
    clock.advance(3)
    store.advance(held, Stage.RECORD, RESULTS, StageTiming(2.5, 0.01))
    records = [completion(row) for row in range(3)]
    records.append(completion(3, finish_reason=FinishReason.ERROR, error="broken"))
    lease = claim(store, 0, Stage.RECORD).lease
    store.commit_group(lease, records, StageTiming(0.5), {})
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
        queue_sec=10.0,
        compute_sec=3.0,
        cost_usd=1.0,
    )
    assert store.progress(JOB).acceptance_rate == 0.25
    assert store.get_job(JOB).prompt_tokens == before.prompt_tokens == 60
    assert store.progress(JOB[:8]).job_id == JOB


def test_rows_that_were_kept_have_not_failed_when_their_group_fails(store: Store) -> None:
    ingest(store, groups=1)
    lease = claim(store, 0).lease
    store.request_cancel(JOB)
    bad = completion(1, finish_reason=FinishReason.ERROR, error="broken")
    store.keep_part(lease, [completion(0), bad], NO_TIME, {})
    finish(store, JobState.CANCELLED, None)
    store.retry_job(JOB)
    exhaust(store, 0)
    done = store.progress(JOB)
    assert (done.rows_done, done.rows_failed, done.completions) == (4, 1 + 2, 2)
    assert store.backlog().rows_failed == 1 + 2


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
