"""What drafting taught, with one test body for both databases, and proposals that are skipped."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
from contracts.shorthand import claim, claim_job, found, ingest, successes, together, verified
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
from specbatch.pipeline.ledger.rules import MOST_TESTED
from specbatch.pipeline.policy.slow_fall import by_series
from specbatch.schemas.errors import FencedError, StoreError
from specbatch.schemas.records import FinishReason, JobState, Lease, Stage
from specbatch.schemas.speculation import (
    VOCABULARY,
    AcceptanceCount,
    AcceptanceDay,
    Decision,
    DecisionAction,
    PastOutput,
)

OTHER_JOB = "job00000000000002"
PATIENCE_SEC = 30.0
DAY = 86_400.0


def decision(at: float = START, **values: Any) -> Decision:
    example = Decision(
        at=at,
        action=DecisionAction.DISABLED,
        proposer="history",
        reason="it was right in 3 of 40 cases, \x00 break-even is 0.21",
        acceptance=0.075,
        break_even=0.21,
        sequences=8,
    )
    return replace(example, **values)


# --- decisions ------------------------------------------------------------------------------


def test_a_decision_comes_back_with_every_field(store: Store) -> None:
    store.create_job(new_job())
    bare = Decision(START, DecisionAction.OFF, "*", "nothing was gained")
    defaults = {f.name: f.default for f in fields(Decision) if f.default is not MISSING}
    assert [name for name in defaults if getattr(decision(), name) == defaults[name]] == []
    store.note_decisions(JOB, [decision(), bare])
    assert store.decisions(JOB) == [decision(), bare]


@pytest.mark.parametrize("action", DecisionAction)
def test_every_action_can_be_noted(store: Store, action: DecisionAction) -> None:
    store.create_job(new_job())
    store.note_decisions(JOB, [decision(action=action)])
    assert [d.action for d in store.decisions(JOB)] == [action]


def test_decisions_come_by_time_and_then_as_they_were_noted(store: Store) -> None:
    store.create_job(new_job())
    store.note_decisions(JOB, [decision(START + 2, reason="c"), decision(reason="a")])
    store.note_decisions(JOB, [decision(START + 2, reason="d"), decision(reason="b")])
    store.note_decisions(JOB, [decision(START + 2, reason="0")])
    assert [d.reason for d in store.decisions(JOB)] == ["a", "b", "c", "d", "0"]


def test_decisions_are_of_one_job(store: Store) -> None:
    store.create_job(new_job())
    store.create_job(new_job(OTHER_JOB))
    store.note_decisions(OTHER_JOB, [decision()])
    assert store.decisions(JOB) == []
    assert store.decisions("nosuchjob") == []


def test_decisions_need_a_job_unless_there_are_none(store: Store) -> None:
    store.note_decisions("nosuchjob", [])
    with pytest.raises(StoreError):
        store.note_decisions("nosuchjob", [decision()])


# --- machines -------------------------------------------------------------------------------


def test_knowledge_is_kept_as_json_and_the_last_writer_wins(store: Store) -> None:
    key = "cpu amx 8 threads, big + small, bfloat16"
    assert store.knowledge(key) is None
    state = {"step_time": {"sizes": (1, 2), "sec": [0.1, 1e-300]}, "seen": {16: None}, "a": {}}
    store.keep_knowledge(key, state)
    state["a"]["changed"] = True  # what was kept is a copy
    kept = store.knowledge(key)
    assert kept == {
        "step_time": {"sizes": [1, 2], "sec": [0.1, 1e-300]},
        "seen": {"16": None},
        "a": {},
    }
    store.keep_knowledge(key, {"step_time": 2})
    store.keep_knowledge("cuda", {})
    assert store.knowledge(key) == {"step_time": 2}
    assert store.knowledge("cuda") == {}


def test_knowledge_is_written_by_many_at_once(store: Store) -> None:
    calls = [partial(store.keep_knowledge, "cpu", {"writer": n}) for n in range(4)]
    successes(together(*calls))
    kept = store.knowledge("cpu")
    assert kept is not None
    assert kept["writer"] in range(4)


# --- acceptance -----------------------------------------------------------------------------


def count(
    agreed: float, tested: float, proposer: str = "ngram", tag: str | None = None
) -> AcceptanceCount:
    return AcceptanceCount(proposer, tag, agreed, tested)


def test_each_model_has_a_record_of_its_own(store: Store) -> None:
    old, new = (AcceptanceCount("draft-model", "news", 1.0, 2.0, of) for of in ("old", "new"))
    store.learn_acceptance("default", "nightly", [old, new])
    store.learn_acceptance("default", "nightly", [new])
    found = store.acceptance("default", "nightly")
    assert found == [replace(new, agreed=2.0, tested=4.0), old]
    assert found[0].learned_at >= found[1].learned_at > 0.0


def test_counts_are_added_per_proposer_and_tag(store: Store) -> None:
    assert store.acceptance("default", "nightly") == []
    store.learn_acceptance("default", "nightly", [count(3, 10), count(1, 4, tag="news\x00")])
    store.learn_acceptance("default", "nightly", [count(2.5, 5), count(7, 8, "block"), count(1, 1)])
    store.learn_acceptance("default", "nightly", [])
    assert store.acceptance("default", "nightly") == [
        count(7, 8, "block"),
        count(6.5, 16),
        count(1, 4, tag="news\x00"),
    ]


def test_an_empty_tag_is_none(store: Store) -> None:
    store.learn_acceptance("default", "nightly", [count(1, 2, tag=""), count(1, 2)])
    assert store.acceptance("default", "nightly") == [count(2, 4)]


def test_a_count_of_nothing_is_not_kept(store: Store) -> None:
    store.learn_acceptance("default", "nightly", [count(0, 0)])
    assert store.acceptance("default", "nightly") == []


def test_acceptance_is_of_one_tenant_and_job_name(store: Store) -> None:
    store.learn_acceptance("default", "nightly", [count(3, 10)])
    assert store.acceptance("other", "nightly") == []
    assert store.acceptance("default", "weekly") == []


def test_what_is_known_is_capped_so_that_newer_nights_weigh_more(store: Store) -> None:
    store.learn_acceptance("default", "nightly", [count(1800, 1900)])
    store.learn_acceptance("default", "nightly", [count(0, 100)])
    assert store.acceptance("default", "nightly") == [count(1800, 2000)]  # exactly full
    store.learn_acceptance("default", "nightly", [count(0, 2000)])
    assert store.acceptance("default", "nightly") == [count(900, MOST_TESTED)]
    store.learn_acceptance("default", "nightly", [count(6000, 6000)])
    assert store.acceptance("default", "nightly") == [count(6900 / 4, MOST_TESTED)]


def test_a_first_count_is_capped_as_well(store: Store) -> None:
    store.learn_acceptance("default", "nightly", [count(2000, 8000)])
    assert store.acceptance("default", "nightly") == [count(500, 2000)]


def test_no_addition_of_concurrent_workers_is_lost(store: Store) -> None:
    one, other = count(1, 2), count(3, 4, "block", "news")

    def learn(counts: list[AcceptanceCount]) -> None:
        for _ in range(10):
            store.learn_acceptance("default", "nightly", counts)

    orders = [[one, other], [other, one], [one, other], [other, one]]
    successes(together(*[partial(learn, counts) for counts in orders]))
    assert store.acceptance("default", "nightly") == [
        count(120, 160, "block", "news"),
        count(40, 80),
    ]
    days = store.acceptance_days("default", "nightly")
    assert [(d.agreed, d.tested) for d in days] == [(120, 160), (40, 80)]


def test_days_keep_every_count_of_a_proposers_buckets_and_tags(store: Store, clock: Clock) -> None:
    today = int(clock.now // DAY)
    store.learn_acceptance("default", "nightly", [count(1800, 1900), count(5, 10, "ngram:2")])
    store.learn_acceptance("default", "nightly", [count(2, 1000), count(1, 4, tag="news\x00")])
    store.learn_acceptance("default", "weekly", [count(1, 1)])
    clock.advance(DAY)
    store.learn_acceptance("default", "nightly", [count(3, 4, "block"), count(0, 0)])
    assert store.acceptance_days("default", "nightly") == [
        AcceptanceDay("block", None, today + 1, 3, 4),
        AcceptanceDay("ngram", None, today, 1807, 2910),
        AcceptanceDay("ngram", "news\x00", today, 1, 4),
    ]
    assert store.acceptance_days("other", "nightly") == []


def test_another_model_has_days_of_its_own_in_one_series_of_nights(store: Store) -> None:
    new, old = (
        replace(count(agreed, 4, "draft-model"), fingerprint=name)
        for agreed, name in ((1, "new"), (3, "old"))
    )
    store.learn_acceptance("default", "nightly", [new, old, old])
    days = store.acceptance_days("default", "nightly")
    assert [(day.fingerprint, day.agreed) for day in days] == [("new", 1), ("old", 6)]
    ((key, (night,)),) = by_series(days).items()
    assert key == ("draft-model", None)
    assert (night.fingerprint, night.agreed, night.tested) == ("old", 7, 12)


def test_days_begin_at_midnight_utc(store: Store, clock: Clock) -> None:
    clock.now = 20_000 * DAY - 1.0
    store.learn_acceptance("default", "nightly", [count(1, 2)])
    clock.advance(1.0)
    store.learn_acceptance("default", "nightly", [count(1, 2)])
    assert [d.day for d in store.acceptance_days("default", "nightly")] == [19_999, 20_000]


def test_an_operator_accepts_what_is_new_as_the_baseline(store: Store, clock: Clock) -> None:
    for name in ("nightly", "weekly"):
        store.learn_acceptance("default", name, [count(1, 2)])
    clock.advance(DAY)
    store.learn_acceptance("default", "nightly", [count(1, 2)])
    assert store.supersede_acceptance("default", "nightly") == 1
    assert store.supersede_acceptance("default", "nightly") == 0
    marked = [d.superseded for d in store.acceptance_days("default", "nightly")]
    assert marked == [True, False]
    assert not store.acceptance_days("default", "weekly")[0].superseded


def test_old_days_are_forgotten(store: Store, clock: Clock) -> None:
    store.learn_acceptance("default", "nightly", [count(1, 2)])
    clock.advance(7 * DAY)
    store.learn_acceptance("default", "nightly", [count(1, 2)])
    assert store.forget_old_acceptance(7) == 0
    assert store.forget_old_acceptance(6) == 1
    assert len(store.acceptance_days("default", "nightly")) == 1


# --- reports --------------------------------------------------------------------------------


def test_a_holder_adds_to_the_report_of_its_job(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.note_report(lease, {VOCABULARY: "v1", "pilot": {"groups": 3}})
    store.note_report(lease, {VOCABULARY: "v2"})
    store.note_report(lease, {})
    assert store.get_job(JOB).report == {VOCABULARY: "v2", "pilot": {"groups": 3}}
    store.finish_ingest(lease, 0, {"verifier": "abc"})  # the lease was not touched
    report = store.get_job(JOB).report
    assert report == {VOCABULARY: "v2", "pilot": {"groups": 3}, "verifier": "abc"}


def test_only_who_holds_the_job_adds_to_its_report(store: Store, clock: Clock) -> None:
    ingest(store, groups=1)
    group = claim(store, 0).lease
    store.create_job(new_job(OTHER_JOB))
    late = found(store.claim_job(OTHER_JOB, Stage.INGEST, "w1", LEASE_SEC)).lease
    clock.advance(LEASE_SEC)
    found(store.claim_job(OTHER_JOB, Stage.INGEST, "w2", LEASE_SEC))
    for lease in (group, late, replace(late, job_id="nosuchjob")):
        with pytest.raises(FencedError):
            store.note_report(lease, {"pilot": 1})
    assert store.get_job(OTHER_JOB).report == {}


# --- past outputs ---------------------------------------------------------------------------


def past_job(
    store: Store, job_id: str, *, vocabulary: str | None = "v1", rows: int = 3, **job: Any
) -> None:
    """A job of one group whose row `r` wrote `r + 1` tokens."""
    store.create_job(new_job(job_id, **job))
    lease = found(store.claim_job(job_id, Stage.INGEST, "i", LEASE_SEC)).lease
    store.add_groups(lease, [new_group(0)], [], 4, position())
    store.finish_ingest(lease, 4, {} if vocabulary is None else {VOCABULARY: vocabulary})
    for stage in (Stage.VERIFY, Stage.RECORD):
        lease = found(store.claim_group(job_id, 0, stage, "w", LEASE_SEC)).lease
        if stage is Stage.VERIFY:
            store.advance(lease, Stage.RECORD, RESULTS, NO_TIME)
    records = [completion(row, token_ids=(row,) * (row + 1)) for row in range(rows)]
    store.commit_group(lease, records, NO_TIME, {})


def past(
    store: Store, max_tokens: int = 10**9, *, asks: str = "job of tonight", name: str = "nightly"
) -> list[PastOutput]:
    return list(store.past_outputs("default", name, "v1", max_tokens, asks))


def test_past_outputs_come_by_row_and_sample(store: Store) -> None:
    ingest(store, groups=1)
    lease = verified(store, 0)
    records = [completion(1, 1), completion(0, token_ids=()), completion(1, 0, token_ids=(9,))]
    store.commit_group(lease, records, NO_TIME, {})
    store.note_report(claim_job(store, Stage.PUBLISH).lease, {VOCABULARY: "v1"})
    assert past(store) == [
        PastOutput(JOB, "row-0", 0, ()),
        PastOutput(JOB, "row-1", 0, (9,)),
        PastOutput(JOB, "row-1", 1, (7, 8, 300_000)),
    ]


def test_only_finished_outputs_are_past_outputs(store: Store) -> None:
    ingest(store, groups=1)
    lease = verified(store, 0)
    reasons = [*FinishReason, FinishReason.STOP]
    records = [completion(row, finish_reason=reason) for row, reason in enumerate(reasons)]
    records[-1] = replace(records[-1], error="nan: the logits are not finite")
    store.commit_group(lease, records, NO_TIME, {})
    store.note_report(claim_job(store, Stage.PUBLISH).lease, {VOCABULARY: "v1"})
    assert [o.row_id for o in past(store)] == ["row-0", "row-1", "row-2"]
    assert reasons[:3] == [FinishReason.STOP, FinishReason.TOOL_CALLS, FinishReason.LENGTH]


def test_jobs_of_the_same_name_come_first_and_newer_ones_before(store: Store, clock: Clock) -> None:
    for number, name in enumerate(["nightly", "weekly", "nightly", "weekly", "Nightly"]):
        past_job(store, f"job{number}", rows=1, name=name)
        clock.advance(1)
    past_job(store, "job4b", rows=1)
    past_job(store, "job4c", rows=1)
    assert [o.job_id for o in past(store)] == [
        *("job4c", "job4b", "job2", "job0"),  # of one time by id
        *("job4", "job3", "job1"),
    ]
    assert [o.job_id for o in past(store, name="weekly")][:2] == ["job3", "job1"]


def test_the_asking_job_and_other_tenants_and_vocabularies_are_left_out(store: Store) -> None:
    past_job(store, "jobtonight")
    past_job(store, "jobother", tenant="Default")
    past_job(store, "jobspace", tenant="default ")
    past_job(store, "jobnewer", vocabulary="v2")
    past_job(store, "jobolder", vocabulary=None)
    past_job(store, "joblast", rows=1)
    assert [o.job_id for o in past(store, asks="jobtonight")] == ["joblast"]
    found_there = list(store.past_outputs("Default", "nightly", "v1", 10**9, "jobtonight"))
    assert {o.job_id for o in found_there} == {"jobother"}
    assert list(store.past_outputs("", "nightly", "v1", 10**9, "jobtonight")) == []


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [(0, 0), (1, 1), (2, 1), (3, 2), (5, 2), (6, 3), (7, 4), (11, 5), (12, 6), (13, 6)],
)
def test_past_outputs_end_before_there_are_too_many_tokens(
    store: Store, max_tokens: int, expected: int
) -> None:
    past_job(store, "job1")
    past_job(store, "job2")  # 1, 2 and 3 tokens each
    assert len(past(store, max_tokens)) == expected


def test_past_outputs_are_streamed_over_pages(store: Store) -> None:
    past_job(store, "job1", rows=5)
    ingest(store, groups=1)
    records = [completion(row, sample) for row in range(150) for sample in range(3)]
    store.commit_group(verified(store, 0), records, NO_TIME, {})
    store.note_report(claim_job(store, Stage.PUBLISH).lease, {VOCABULARY: "v1"})
    outputs = [o for o in past(store) if o.job_id == JOB]
    assert [(o.row_id, o.sample_index) for o in outputs] == [
        (r.row_id, r.sample_index) for r in records
    ]
    some = store.past_outputs("default", "nightly", "v1", 10**9, "")
    assert len(list(islice(some, 3))) == 3


def test_an_unfinished_job_has_past_outputs_too(store: Store) -> None:
    past_job(store, "job1")
    assert store.get_job("job1").state is JobState.RUNNING
    assert len(past(store)) == 3


# --- proposals that are skipped -------------------------------------------------------------


def test_a_group_that_waits_too_long_for_drafts_goes_on_without(store: Store, clock: Clock) -> None:
    ingest(store, groups=2, first_stage=Stage.PROPOSE)
    clock.advance(PATIENCE_SEC)
    assert store.skip_proposals(PATIENCE_SEC) == []  # not longer than that
    clock.advance(1)
    assert store.skip_proposals(PATIENCE_SEC) == [(JOB, 0), (JOB, 1)]
    assert store.skip_proposals(PATIENCE_SEC) == []
    assert store.claim_group(JOB, 0, Stage.PROPOSE, "w", LEASE_SEC) is None
    clock.advance(5)
    work = claim(store, 0)
    assert (work.drafts, work.lease.attempt, work.lease.token) == (None, 1, 2)
    store.advance(work.lease, Stage.RECORD, RESULTS, NO_TIME)
    assert store.progress(JOB).queue_sec == 5  # ready since it was skipped


def test_a_held_group_is_not_skipped_however_long_it_was_ready(store: Store, clock: Clock) -> None:
    ingest(store, groups=1, first_stage=Stage.PROPOSE)
    clock.advance(2 * PATIENCE_SEC)
    lease = claim(store, 0, Stage.PROPOSE).lease
    assert store.skip_proposals(PATIENCE_SEC) == []
    clock.advance(LEASE_SEC)
    assert store.skip_proposals(PATIENCE_SEC) == []  # the lease has just run out
    clock.advance(PATIENCE_SEC)
    assert store.skip_proposals(PATIENCE_SEC) == []
    store.heartbeat([lease], LEASE_SEC)  # and its proposer comes back
    clock.advance(LEASE_SEC)
    assert store.skip_proposals(PATIENCE_SEC) == []
    store.advance(lease, Stage.VERIFY, DRAFTS, NO_TIME)
    assert claim(store, 0).drafts == DRAFTS


def test_a_late_proposer_is_fenced(store: Store, clock: Clock) -> None:
    ingest(store, groups=1, first_stage=Stage.PROPOSE)
    late = claim(store, 0, Stage.PROPOSE).lease
    clock.advance(LEASE_SEC + PATIENCE_SEC + 1)
    assert store.skip_proposals(PATIENCE_SEC) == [(JOB, 0)]
    with pytest.raises(FencedError):
        store.advance(late, Stage.VERIFY, DRAFTS, NO_TIME)
    assert store.heartbeat([late], LEASE_SEC) == ({late}, set(), set())
    store.release(late, "too late")
    work = claim(store, 0)
    assert (work.drafts, work.lease.attempt) == (None, 1)
    assert work.lease.token == late.token + 2


def test_a_group_given_back_waits_anew(store: Store, clock: Clock) -> None:
    ingest(store, groups=1, first_stage=Stage.PROPOSE)
    clock.advance(2 * PATIENCE_SEC)
    store.release(claim(store, 0, Stage.PROPOSE).lease, "stopped")
    clock.advance(PATIENCE_SEC)
    assert store.skip_proposals(PATIENCE_SEC) == []
    clock.advance(1)
    assert store.skip_proposals(PATIENCE_SEC) == [(JOB, 0)]


def test_only_the_propose_stage_is_skipped(store: Store, clock: Clock) -> None:
    ingest(store, groups=3, first_stage=Stage.VERIFY)
    store.advance(claim(store, 0).lease, Stage.RECORD, RESULTS, NO_TIME)
    before = store.due()
    clock.advance(100 * PATIENCE_SEC)
    assert store.skip_proposals(0.0) == []
    assert store.due() == before


def test_groups_of_all_jobs_are_skipped_a_cancelled_ones_too(store: Store, clock: Clock) -> None:
    ingest(store, groups=2, first_stage=Stage.PROPOSE)
    store.create_job(new_job(OTHER_JOB))
    lease = found(store.claim_job(OTHER_JOB, Stage.INGEST, "i", LEASE_SEC)).lease
    store.add_groups(lease, [new_group(0, first_stage=Stage.PROPOSE)], [], 4, position())
    claim(store, 1, Stage.PROPOSE)
    store.request_cancel(JOB)  # 0 is cancelled at once; 1 is held by a proposer that has vanished
    clock.advance(LEASE_SEC + 1)
    assert store.skip_proposals(0.0) == [(JOB, 1), (OTHER_JOB, 0)]
    assert store.claim_group(JOB, 1, Stage.VERIFY, "w", LEASE_SEC) is None
    assert [stage for _, stage, _, _ in store.failed_groups(JOB)] == ["cancelled", "cancelled"]
    assert store.get_job(JOB).stage is Stage.PUBLISH


def test_each_group_is_skipped_once_and_never_while_it_is_claimed(
    store: Store, clock: Clock
) -> None:
    ingest(store, groups=12, first_stage=Stage.PROPOSE)
    clock.advance(PATIENCE_SEC + 1)
    skip = partial(store.skip_proposals, PATIENCE_SEC)

    def propose() -> list[Lease]:
        works = [
            store.claim_group(JOB, n, Stage.PROPOSE, "w", LEASE_SEC) for n in range(11, -1, -1)
        ]
        return [work.lease for work in works if work is not None]

    *claims, one, other = successes(together(propose, propose, skip, skip))
    claimed = [lease.group_index for leases in claims for lease in leases]
    skipped = [index for _, index in [*one, *other]]
    left = [index for _, index in skip()]  # what the racing ones left to each other
    assert sorted([*claimed, *skipped, *left]) == list(range(12))


def test_groups_behind_a_busy_proposer_wait_on(store: Store, clock: Clock) -> None:
    ingest(store, groups=3, first_stage=Stage.PROPOSE)
    clock.advance(PATIENCE_SEC + 1)
    lease = claim(store, 0, Stage.PROPOSE).lease
    assert store.skip_proposals(PATIENCE_SEC) == []  # somebody works on the job's drafts
    store.advance(lease, Stage.VERIFY, DRAFTS, NO_TIME)
    assert store.skip_proposals(PATIENCE_SEC) == []  # and has just finished some
    clock.advance(PATIENCE_SEC + 1)
    assert store.skip_proposals(PATIENCE_SEC) == [(JOB, 1), (JOB, 2)]
