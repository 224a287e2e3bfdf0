"""Where jobs may be worked on, on both databases: compared by every claim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pytest
from contracts.shorthand import F32, TORCH, claim_job, finish, found, ingest, serving
from ledger.builders import JOB, LEASE_SEC, NO_TIME, RESULTS, Clock, completion, new_job

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.placement import PlacementSpec, Site
from specbatch.schemas.presence import WorkerProcess
from specbatch.schemas.records import Stage, StageTiming
from specbatch.schemas.speculation import VOCABULARY
from specbatch.schemas.timekeeping import Device, NewSession

At = Callable[..., Store]
EU = {"regions": ["eu", "eu-west"]}
SERVES = serving(F32)


@pytest.fixture
def at(url: str, clock: Clock) -> Iterator[At]:
    """Opens the store as a worker at a site does."""
    with ExitStack() as opened:

        def open_at(region: str, is_spot: bool = False) -> Store:
            site = Site(region, is_spot)
            return opened.enter_context(closing(SqlStore(url, clock=clock, site=site)))

        yield open_at


def asking(**placement: Any) -> dict[str, Any]:
    return {**new_job().spec, "placement": placement}


def announce(store: Store, owner: str, price: int, region: str, serves: Serves | None) -> None:
    device = Device("gpu", region, "spot" if "spot" in owner else "reserved", price, owner)
    store.begin_session(NewSession(f"session-{owner}", owner, device, 0, serves))


def claims_verify(store: Store) -> bool:
    """Whether a worker may have a group, by either claim, which it then gives back."""
    by_turn = partial(store.claim_next, Stage.VERIFY, "big", "w", LEASE_SEC, SERVES)
    by_number = partial(store.claim_group, JOB, 0, Stage.VERIFY, "w", LEASE_SEC, SERVES)
    had = []
    for claim in (by_turn, by_number):
        had.append(work := claim())
        if work is not None:
            store.release(work.lease, "", forgiven=True)
    assert (had[0] is None) is (had[1] is None)
    return had[0] is not None


@pytest.mark.parametrize("other", ["us", "eu_west", "EU"])
def test_no_claim_of_another_region_touches_a_bound_job(store: Store, at: At, other: str) -> None:
    there, here = at(other), at("eu-west")
    store.create_job(new_job(spec=asking(**EU)))
    assert there.claim_job(JOB, Stage.INGEST, "w", LEASE_SEC) is None
    lease = claim_job(here, Stage.INGEST).lease
    here.release(lease, "", forgiven=True)
    ingest(here, groups=1, job_id="second", spec=asking(**EU))
    assert there.claim_next(Stage.VERIFY, "big", "w", LEASE_SEC, SERVES) is None
    assert there.claim_group("second", 0, Stage.VERIFY, "w", LEASE_SEC, SERVES) is None
    assert there.claim_group("second", 0, Stage.VERIFY, "w", LEASE_SEC) is None
    work = found(here.claim_next(Stage.VERIFY, "big", "w", LEASE_SEC, SERVES))
    assert there.ask_for_split("big", "other", SERVES) is None
    here.advance(work.lease, Stage.RECORD, RESULTS, NO_TIME)
    assert there.claim_group("second", 0, Stage.RECORD, "w", LEASE_SEC) is None
    recording = found(here.claim_group("second", 0, Stage.RECORD, "w", LEASE_SEC))
    here.commit_group(recording.lease, [], NO_TIME, {})
    assert there.claim_job("second", Stage.PUBLISH, "w", LEASE_SEC) is None
    assert here.claim_job("second", Stage.PUBLISH, "w", LEASE_SEC) is not None


def test_a_class_is_pinned_that_a_worker_in_the_region_serves(store: Store, at: At) -> None:
    for owner in ("there", "there-too", "and-there"):
        announce(store, owner, 1, "us", serving(TORCH))
    ingest(store, groups=1, spec=asking(**EU))
    assert claims_verify(at("eu"))
    assert store.get_job(JOB).numeric_class == F32


def test_drafts_ahead_are_made_in_the_region_too(store: Store, at: At) -> None:
    ingest(store, groups=1, first_stage=Stage.PROPOSE, spec=asking(**EU))
    for worker, may in ((at("us"), False), (at("eu"), True)):
        assert (worker.claim_next(Stage.PROPOSE, "small", "w", LEASE_SEC) is not None) is may


def test_jobs_that_ask_for_nothing_are_for_everybody(store: Store, at: At) -> None:
    ingest(store)
    assert claims_verify(at("us", True))
    ingest(store, job_id="second", spec=asking(regions=[], spot=True))
    assert at("us", True).claim_group("second", 0, Stage.VERIFY, "w", 60.0, SERVES) is not None


def test_a_job_may_keep_off_devices_that_can_be_taken_away(store: Store, at: At) -> None:
    ingest(store, spec=asking(spot=False))
    assert not claims_verify(at("eu", True))
    assert claims_verify(at("eu"))


def test_only_the_named_jobs_are_claimed_and_asked_for(store: Store) -> None:
    ingest(store)
    ingest(store, job_id="second")
    work = found(store.claim_next(Stage.VERIFY, "big", "w", LEASE_SEC, SERVES, {"second"}))
    assert work.lease.job_id == "second"
    assert store.claim_next(Stage.VERIFY, "big", "w", LEASE_SEC, SERVES, set()) is None
    while store.claim_next(Stage.VERIFY, "big", "w", LEASE_SEC, SERVES):
        pass
    assert store.ask_for_split("big", "other", SERVES, set()) is None
    asked = store.ask_for_split("big", "other", SERVES, {"second"})
    assert asked is not None
    assert asked[0] == "second"


def test_texts_of_a_bound_job_are_given_to_jobs_that_stay_there(store: Store) -> None:
    for job_id, spec in (("bound", asking(**EU)), ("free", new_job().spec)):
        ingest(store, groups=1, job_id=job_id, spec=spec)
        lease = found(store.claim_group(job_id, 0, Stage.VERIFY, "w", LEASE_SEC)).lease
        store.advance(lease, Stage.RECORD, RESULTS, NO_TIME)
        lease = found(store.claim_group(job_id, 0, Stage.RECORD, "w", LEASE_SEC)).lease
        store.commit_group(lease, [completion(row) for row in range(4)], NO_TIME, {})
        store.note_report(claim_job(store, Stage.PUBLISH, job_id=job_id).lease, {VOCABULARY: "v"})

    def from_jobs(placement: PlacementSpec) -> set[str]:
        found = store.past_outputs("default", "nightly", "v", 10**6, JOB, placement)
        return {output.job_id for output in found}

    assert from_jobs(PlacementSpec()) == {"free"}
    assert from_jobs(PlacementSpec(regions=("eu",))) == {"bound", "free"}
    assert from_jobs(PlacementSpec(regions=("eu", "us"))) == {"free"}


def test_a_job_waits_for_a_worker_where_it_may_be(store: Store) -> None:
    ingest(store, spec=asking(regions=["eu"]))
    announce(store, "far", 1, "us", SERVES)
    far = WorkerProcess("1", "far", ("verify",), verifier="big", site=Site("us"))
    store.report_process(far, None)
    assert store.backlog().waiting() == {
        JOB: "waits for a worker in region eu to verify; alive: us"
    }
    announce(store, "near", 1, "eu", SERVES)
    near = WorkerProcess("2", "near", ("verify",), verifier="big", site=Site("eu"))
    store.report_process(near, None)
    assert store.backlog().waiting() == {}


def test_what_placement_by_price_reads(store: Store, clock: Clock) -> None:
    announce(store, "spot-1", 500_000, "eu", SERVES)
    announce(store, "dear", 2_000_000, "eu", SERVES)
    ingest(store, groups=3, deadline_sec=100.0, spec=asking(regions=["eu"]))
    (job,) = store.open_jobs()
    assert (job.rows, job.is_read, job.sec_per_row, job.group_rows) == (12, True, None, 4)
    assert job.moved_at == clock()
    assert job.deadline_at == clock() + 100.0
    clock.advance(5.0)
    work = found(store.claim_next(Stage.VERIFY, "big", "dear", LEASE_SEC, SERVES))
    store.advance(work.lease, Stage.RECORD, RESULTS, StageTiming(8.0))
    (job,) = store.open_jobs()
    assert (job.rows, job.sec_per_row, job.moved_at) == (8, 2.0, clock())
    alive = store.alive(60.0)
    assert [(one.device.pool, one.device.tenure) for one in alive.workers] == [
        ("dear", "reserved"),
        ("spot-1", "spot"),
    ]
    assert all(job.pinned.may_be_verified_by(one) for one in alive.workers)
    clock.advance(61.0)
    assert store.alive(60.0).workers == ()


def test_the_speed_of_the_last_job_of_the_name_counts_until_a_group_is_done(
    store: Store,
) -> None:
    ingest(store, groups=1)
    work = found(store.claim_group(JOB, 0, Stage.VERIFY, "w", LEASE_SEC))
    store.advance(work.lease, Stage.RECORD, RESULTS, StageTiming(12.0))
    record = found(store.claim_group(JOB, 0, Stage.RECORD, "w", LEASE_SEC))
    store.commit_group(record.lease, [], NO_TIME, {})
    finish(store)
    ingest(store, job_id="tonight", deadline_sec=60.0)
    assert [job.sec_per_row for job in store.open_jobs()] == [3.0]
    ingest(store, job_id="another", name="else", deadline_sec=60.0)
    assert [job.sec_per_row for job in store.open_jobs()] == [None, 3.0]
