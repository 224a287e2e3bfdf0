"""What a worker's work is in metrics: equal to the store's totals, and discreet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from ledger.builders import JOB, LEASE_SEC, Clock, completion, new_group, new_job, position

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.observe.metrics import metric_names as names
from specbatch.pipeline.observe.metrics.meter import (
    PRIVATE,
    UNKNOWN,
    Meter,
    by_proposer,
    saved_usd,
)
from specbatch.pipeline.observe.metrics.metric_names import Metric
from specbatch.pipeline.observe.metrics.registry import Metrics
from specbatch.pipeline.runtime.metering import metered
from specbatch.schemas.errors import FencedError, StoreError
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.provenance import NO_PROVENANCE, TICKS_PER_SEC, Provenance
from specbatch.schemas.records import (
    NO_TAG,
    CompletionRecord,
    FinishReason,
    Lease,
    Origin,
    RejectedRow,
    Stage,
    StageTiming,
)
from support.databases import new_database
from support.scraping import reading

P, A, C, B = (int(o) for o in (Origin.PLAIN, Origin.ACCEPTED, Origin.CORRECTED, Origin.BONUS))
NO_TIME = StageTiming(0.0)


def record(row: int = 0, **values: Any) -> CompletionRecord:
    """A completion with two drafts: all 3 of one source's accepted, then 1 of 2 of another's."""
    made = completion(
        row,
        reused_from=None,
        token_ids=(1, 2, 3, 4, 5, 6, 7),
        origins=(A, A, A, B, P, A, C),
        logprobs=(-1.0,) * 7,
        proposed=5,
        accepted=4,
        verifier_passes=3,
        provenance=Provenance(
            sources=("ngram", "draft-model"), makers=(0, 1), drafted=(3, 2), rejected=(9,)
        ),
    )
    return replace(made, **values)


# --- whose drafts -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"ngram": (3, 3), "draft-model": (2, 1)}),
        # A stop inside of the last draft cut its third token and what would have come behind it.
        (
            {"origins": (A, A), "proposed": 3, "accepted": 3,
             "provenance": Provenance(sources=("ngram",), makers=(0,), drafted=(3,))},
            {"ngram": (3, 3)},
        ),
        # The first draft was refused at once, the second one cut by a stop.
        (
            {"origins": (C, A), "proposed": 6, "accepted": 2,
             "provenance": Provenance(sources=("a", "b"), makers=(0, 1), drafted=(2, 4))},
            {"a": (2, 0), "b": (4, 2)},
        ),
        ({"proposed": 0, "accepted": 0, "origins": (P, P)}, {}),
        ({"provenance": NO_PROVENANCE}, {UNKNOWN: (5, 4)}),
    ],
    ids=["two sources", "a stop inside", "refused, then a stop", "no draft", "not told"],
)  # fmt: skip
def test_drafts_are_their_maker_s_and_add_up(
    values: dict[str, Any], expected: dict[str, tuple[int, int]]
) -> None:
    made = record(**values)
    assert by_proposer(made) == expected
    drafted = by_proposer(made).values()
    assert sum(proposed for proposed, _ in drafted) == made.proposed
    assert sum(accepted for _, accepted in drafted) == made.accepted


# --- a store that is listened to ----------------------------------------------------------------
class Watched(SqlStore):
    """What a test does before a lease is used, and right after the store has answered."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(new_database(), max_attempts=3, clock=clock)
        self.before: Callable[[], object] = lambda: None
        self.after: Callable[[], object] = lambda: None

    def _watched(self, call: Callable[[], Any]) -> Any:
        self.before()
        found = call()
        self.after()
        return found

    def add_groups(self, *args: Any, **kwargs: Any) -> None:
        self._watched(partial(super().add_groups, *args, **kwargs))

    def commit_group(self, *args: Any, **kwargs: Any) -> Any:
        return self._watched(partial(super().commit_group, *args, **kwargs))

    def release(self, *args: Any, **kwargs: Any) -> Any:
        return self._watched(partial(super().release, *args, **kwargs))

    def cancel_group(self, *args: Any, **kwargs: Any) -> None:
        self._watched(partial(super().cancel_group, *args, **kwargs))


class BreakingMetrics(Metrics):
    """Counts until it is broken."""

    is_broken = False

    def count(self, *args: Any, **kwargs: Any) -> None:
        assert not self.is_broken
        super().count(*args, **kwargs)


class Site:
    def __init__(self, **job: Any) -> None:
        self.clock = Clock()
        self.metrics = BreakingMetrics()
        self.meter = Meter(self.metrics, self.clock)
        self.bare = Watched(self.clock)
        self.store = metered(self.bare, self.meter)
        self.store.create_job(new_job(**job))
        lease = self.claim_job(Stage.INGEST)
        groups = [new_group(index) for index in range(3)]
        codes = ["empty_prompt", "empty_prompt", "too_long"]
        rejected = [RejectedRow(20 + i, None, code, "because") for i, code in enumerate(codes)]
        self.store.add_groups(lease, groups, rejected, 30, position(30))
        self.store.finish_ingest(lease, 30, {})
        self.store.get_job(JOB)

    def claim_job(self, stage: Stage) -> Lease:
        work = self.store.claim_job(JOB, stage, "w1", LEASE_SEC)
        assert work is not None
        return work.lease

    def claim(self, index: int, stage: Stage = Stage.VERIFY, owner: str = "w1") -> Lease:
        work = self.store.claim_group(JOB, index, stage, owner, LEASE_SEC)
        assert work is not None
        return work.lease

    def lose(self, lease: Lease) -> None:
        """Somebody else has the group, or the job, from now on."""
        self.clock.advance(LEASE_SEC + 1)
        if lease.group_index is None:
            assert self.bare.claim_job(lease.job_id, lease.stage, "w2", LEASE_SEC)
        else:
            assert self.bare.claim_group(JOB, lease.group_index, lease.stage, "w2", LEASE_SEC)

    def verified(self, index: int) -> Lease:
        artefact = new_group(0).prompts
        self.store.advance(self.claim(index), Stage.RECORD, artefact, NO_TIME)
        return self.claim(index, Stage.RECORD)

    def series(self, metric: Metric, suffix: str = "") -> dict[tuple[str, ...], float]:
        """Those that are not zero."""
        found = reading(self.metrics).series(metric, suffix)
        return {labels: value for labels, value in found.items() if value}

    def total(self, metric: Metric) -> float:
        return sum(self.series(metric).values())


def test_a_commit_counts_what_the_store_adds_to_its_totals() -> None:
    site = Site()
    records = [
        record(0, tag=None),
        record(1, finish_reason=FinishReason.LENGTH),
        record(1, sample_index=1, cost_usd=1.5),
    ]
    site.store.commit_group(site.verified(0), records, NO_TIME, {})
    progress = site.store.progress(JOB)
    assert site.total(names.PROPOSED) == progress.proposed == 15
    assert site.total(names.ACCEPTED) == progress.accepted == 12
    assert site.total(names.EMITTED) == progress.completion_tokens == 21
    assert site.total(names.COMPLETIONS) == progress.completions == 3
    assert site.total(names.COST) == progress.cost_usd == 2.0
    assert site.total(names.PROMPT_TOKENS) == 10, "of each row once"
    assert site.series(names.PROPOSED) == {
        ("nightly", "ngram", NO_TAG): 3,
        ("nightly", "draft-model", NO_TAG): 2,
        ("nightly", "ngram", "news"): 6,
        ("nightly", "draft-model", "news"): 4,
    }
    assert site.series(names.EMITTED) == {
        ("nightly", "plain"): 3,
        ("nightly", "accepted"): 12,
        ("nightly", "corrected"): 3,
        ("nightly", "bonus"): 3,
    }
    assert site.total(names.BASELINE_COST) == pytest.approx(2.0 + saved_usd(records))


def test_tokens_of_a_copy_have_an_origin_of_their_own() -> None:
    site = Site()
    copied = record(1, reused_from="before/0/0", cost_usd=0.0)
    site.store.commit_group(site.verified(0), [record(0), copied], NO_TIME, {})
    assert site.total(names.REUSED) == 1
    emitted = site.series(names.EMITTED)
    assert emitted["nightly", "reused"] == 7
    assert sum(emitted.values()) == site.store.progress(JOB).completion_tokens == 14


def test_drafting_ahead_is_charged_by_the_measured_part_of_the_time() -> None:
    """Else a job of few measured steps pays for the drafts of all others too."""
    told = replace(
        record(0), price_microusd=1_000_000, decode_sec=1800.0, compute_sec=3600.0,
        baseline_sec=3600.0, ahead_ticks=3600 * TICKS_PER_SEC, ahead_price_microusd=500_000,
    )  # fmt: skip
    assert saved_usd([told]) == pytest.approx(1.0 - 0.5 - 0.5 * 0.5)
    assert saved_usd([replace(told, baseline_sec=0.0)]) == 0.0, "nothing was measured"


def test_a_commit_that_is_refused_counts_nothing_but_itself() -> None:
    site = Site()
    lease = site.verified(0)
    site.clock.advance(LEASE_SEC + 1)
    mine = site.claim(0, Stage.RECORD, "w2")
    for _ in range(2):
        with pytest.raises(FencedError):
            site.store.commit_group(lease, [record()], NO_TIME, {})
        site.store.heartbeat([lease], LEASE_SEC)
    assert site.total(names.EMITTED) == 0
    assert site.series(names.FENCED) == {("record",): 1}, "an attempt is lost once"
    site.store.commit_group(mine, [record()], NO_TIME, {})
    assert site.total(names.EMITTED) == 7


def test_a_lost_lease_is_told_by_a_heartbeat_alone() -> None:
    site = Site()
    lease = site.claim(0)
    site.lose(lease)
    for _ in range(2):
        site.store.heartbeat([lease], LEASE_SEC)
    assert site.series(names.FENCED) == {("verify",): 1}


def test_a_heartbeat_right_behind_the_end_takes_it_for_no_loss() -> None:
    site = Site()
    leases = kept, returned, stopped = site.verified(0), site.claim(1), site.claim(2)
    lost: list[int] = []
    site.bare.after = lambda: lost.append(len(site.store.heartbeat(leases, LEASE_SEC).lost))
    site.store.commit_group(kept, [record()], NO_TIME, {})
    site.store.release(returned, "it broke")
    site.store.cancel_group(stopped)
    assert lost == [1, 2, 3], "it came before the worker knew that they had ended"
    assert site.series(names.FENCED) == {}
    assert site.series(names.RETRIES) == {("verify",): 1}
    assert ("record",) in site.series(names.COMPUTE_SECONDS, "_count")


def test_a_lease_that_is_lost_while_its_input_is_stored_is_told() -> None:
    site = Site()
    other = new_job("job00000000000002")
    site.store.create_job(other)
    work = site.store.claim_job(other.job_id, Stage.INGEST, "w1", LEASE_SEC)
    assert work is not None
    lease = work.lease

    def lose() -> None:
        site.lose(lease)
        site.store.heartbeat([lease], LEASE_SEC)

    site.bare.after = lose
    site.store.add_groups(lease, [new_group(0)], [], 4, position(4))
    assert site.series(names.FENCED) == {("ingest",): 1}


def test_a_lost_lease_that_is_given_back_is_no_retry() -> None:
    site = Site()
    lease = site.claim(0)
    site.lose(lease)
    site.store.release(lease, "too late")
    assert site.series(names.RETRIES) == {}


@pytest.mark.parametrize(
    "end",
    [
        lambda store, lease: store.release(lease, "it broke"),
        lambda store, lease: store.cancel_group(lease),
    ],
    ids=["given back", "stopped"],
)
def test_a_group_that_ends_without_the_store_is_not_here_any_more(
    end: Callable[[Store, Lease], object],
) -> None:
    site = Site()
    lease = site.claim(0)
    site.meter.drafting_switched(JOB, "ngram", True)

    def is_away() -> None:
        raise StoreError("the database is out of reach")

    site.bare.before = is_away
    with pytest.raises(StoreError):
        end(site.store, lease)
    assert reading(site.metrics).series(names.BREAKER_OPEN) == {}
    assert site.series(names.RETRIES) == {}


def test_what_cannot_be_counted_is_kept_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    site = Site()
    first, second, lost = site.verified(0), site.verified(1), site.claim(2)
    site.metrics.is_broken = True
    for row, lease in ((0, first), (4, second)):
        assert site.store.commit_group(lease, [record(row)], NO_TIME, {}) is None
    assert site.store.progress(JOB).completion_tokens == 14
    assert len(caplog.records) == 1, "it is told once"
    site.lose(lost)
    with pytest.raises(FencedError):
        site.store.cancel_group(lost)


def test_rows_kept_of_a_stopped_group_count_too() -> None:
    site = Site()
    lease = site.claim(0)
    site.store.request_cancel(JOB)
    site.store.keep_part(lease, [record()], NO_TIME, {})
    assert site.total(names.EMITTED) == site.store.progress(JOB).completion_tokens == 7


def test_queue_and_compute_time_are_told_apart() -> None:
    site = Site()
    site.clock.advance(40.0)
    lease = site.claim(0)
    site.clock.advance(7.0)
    site.store.advance(lease, Stage.RECORD, new_group(0).prompts, NO_TIME)
    site.clock.advance(2.0)
    lease = site.claim(0, Stage.RECORD)
    site.clock.advance(0.5)
    site.store.commit_group(lease, [record()], NO_TIME, {})
    assert site.series(names.QUEUE_SECONDS, "_sum") == {("verify",): 40.0, ("record",): 2.0}
    assert site.series(names.COMPUTE_SECONDS, "_sum") == {("verify",): 7.0, ("record",): 0.5}


def test_errors_are_retries_and_a_worker_that_stops_is_none() -> None:
    site = Site()
    site.store.release(site.claim(0), "out of memory")
    site.store.release(site.claim(1), "the worker was stopped", forgiven=True)
    site.store.release(site.verified(2), "the disk is full")
    assert site.series(names.RETRIES) == {("verify",): 1, ("record",): 1}
    advanced = site.series(names.COMPUTE_SECONDS, "_count")
    assert set(advanced) == {("verify",)}, "only of groups that went on"


def test_quarantined_rows_are_told_by_their_code() -> None:
    assert Site().series(names.QUARANTINED) == {("empty_prompt",): 2, ("too_long",): 1}


def test_sweeps_are_counted() -> None:
    site = Site()
    site.store.due()
    site.meter.enqueued(Stage.VERIFY)
    assert site.series(names.SWEEPS) == {(): 1}
    assert site.series(names.ENQUEUED) == {("verify",): 1}


# --- drafting that collapsed, or is off ---------------------------------------------------------
def test_a_collapse_is_told_while_its_job_is_verified_here() -> None:
    site = Site()
    lease = site.claim(0)
    site.meter.acceptance_collapsed(JOB, "draft-model", True)
    site.meter.acceptance_collapsed("another job", "draft-model", True)
    assert reading(site.metrics).series(names.COLLAPSED) == {("nightly", "draft-model"): 1.0}
    site.store.release(lease, "it ends", forgiven=True)
    assert reading(site.metrics).series(names.COLLAPSED) == {}


def test_a_breaker_is_told_while_its_job_is_verified_here() -> None:
    site = Site()
    lease = site.claim(0)
    site.meter.drafting_switched(JOB, "ngram", True)
    site.meter.drafting_switched("another job", "ngram", True)
    site.meter.drafting_switched(JOB, "*", False)
    of_job = {("nightly", "ngram"): 1.0, ("nightly", "*"): 0.0}
    assert reading(site.metrics).series(names.BREAKER_OPEN) == of_job
    site.meter.drafting_switched(JOB, "ngram", False)
    assert site.series(names.BREAKER_OPEN) == {}
    site.store.release(lease, "it ends", forgiven=True)
    assert reading(site.metrics).series(names.BREAKER_OPEN) == {}


# --- what is not told ---------------------------------------------------------------------------
def test_nothing_is_told_of_a_job_of_which_nothing_is_kept() -> None:
    site = Site(name="the will of Anna", privacy=PrivacyMode.HASH_ONLY)
    site.store.commit_group(site.verified(0), [record(tag="c0ffee")], NO_TIME, {})
    observer = site.meter.observer(verifies=True)
    observer.first_token(JOB, 1.0)
    observer.finished(JOB, 0.1)
    counters, histograms = (names.PROPOSED, names.EMITTED), (names.FIRST_TOKEN, names.PER_TOKEN)
    series = [(metric, site.series(metric)) for metric in counters]
    series += [(metric, site.series(metric, "_count")) for metric in histograms]
    for metric, values in series:
        assert values
        for labels in values:
            of = dict(zip(metric.labels, labels, strict=True))
            assert of["job"] == PRIVATE
            assert of.get("tag", PRIVATE) == PRIVATE
    assert site.total(names.EMITTED) == 7


def test_a_redacted_job_is_told_as_the_store_has_it() -> None:
    site = Site(name="letters of [EMAIL]", privacy=PrivacyMode.REDACTED)
    site.store.commit_group(site.verified(0), [record(tag="tag [PHONE]")], NO_TIME, {})
    assert {labels[::2] for labels in site.series(names.PROPOSED)} == {
        ("letters of [EMAIL]", "tag [PHONE]")
    }


def test_an_engine_tells_of_jobs_by_their_names_and_of_unknown_ones_by_none() -> None:
    site = Site()
    observer = site.meter.observer(verifies=True)
    observer.first_token(JOB, 1.0)
    observer.first_token("0123456789", 1.0)
    assert set(site.series(names.FIRST_TOKEN, "_count")) == {("nightly",), ("unknown",)}
