"""Numeric classes on both databases: pinned once, compared by every claim, moved on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from contracts.shorthand import (
    F32,
    TORCH,
    claim,
    commit,
    finish,
    found,
    ingest,
    serving,
    successes,
    together,
    verified,
)
from ledger.builders import JOB, LEASE_SEC, NO_TIME, RESULTS, Clock, new_job

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.errors import FencedError, UsageError
from specbatch.schemas.numeric_class import UNKNOWN, Serves, engine_key
from specbatch.schemas.records import GroupWork, JobState, Stage
from specbatch.schemas.timekeeping import Device, NewSession, SessionTime

BF16 = "exact/bf16/dot/1"
DEVICE = Device("cpu", "here", "owned", 1)


def announce(store: Store, owner: str, serves: Serves | None) -> None:
    store.begin_session(NewSession(f"session-{owner}", owner, DEVICE, 0, serves))


def claim_next(store: Store, owner: str, serves: Serves) -> GroupWork | None:
    return store.claim_next(Stage.VERIFY, "big", owner, LEASE_SEC, serves)


def claim_group(store: Store, index: int, owner: str, serves: Serves) -> GroupWork | None:
    return store.claim_group(JOB, index, Stage.VERIFY, owner, LEASE_SEC, serves)


def pinned(store: Store) -> str | None:
    return store.get_job(JOB).numeric_class


def test_a_job_has_no_class_before_its_first_claim_for_verify(store: Store) -> None:
    ingest(store)
    assert pinned(store) is None
    work = found(claim_next(store, "w", serving(F32)))
    assert (work.numeric_class, pinned(store)) == (F32, F32)


def test_a_claim_by_number_pins_too(store: Store) -> None:
    ingest(store)
    assert found(claim_group(store, 1, "w", serving(F32))).numeric_class == F32
    assert pinned(store) == F32


def test_a_claim_that_looks_at_no_class_pins_none(store: Store) -> None:
    ingest(store)
    assert claim(store, 0).numeric_class is None
    assert pinned(store) is None


def test_a_job_that_a_worker_cannot_run_as_asked_is_left_to_others(store: Store) -> None:
    fast_only = Serves.of("big", {engine_key("auto", "fast", "as-is"): "vllm/bf16/5d0c1a2b"})
    ingest(store)  # of `exactness: bitwise`
    assert claim_next(store, "w", fast_only) is None
    assert claim_group(store, 0, "w", fast_only) is None
    assert store.ask_for_split("big", "w", fast_only) is None
    spec = {**new_job().spec, "engine": {"exactness": "fast"}}
    ingest(store, job_id="second", spec=spec)
    work = found(claim_next(store, "w", fast_only))
    assert (work.lease.job_id, work.numeric_class) == ("second", "vllm/bf16/5d0c1a2b")
    assert pinned(store) is None
    assert found(claim_next(store, "other", serving(F32))).lease.job_id == JOB


def test_a_job_of_vllms_own_speculation_is_for_workers_that_have_it(store: Store) -> None:
    key = engine_key("auto", "fast", "as-is")
    name = "vllm/bf16/5d0c1a2b"
    spec = {**new_job().spec, "engine": {"exactness": "fast"}}
    for proposer in ({"kind": "eagle3", "model": "o/head"}, {"kind": "suffix", "model": None}):
        own = ":".join(filter(None, proposer.values()))
        ingest(store, job_id=f"of-{proposer['kind']}", spec={**spec, "proposer": proposer})
        for others in (serving(F32), Serves.of("big", {key: name, f"{key}/mtp": name})):
            assert claim_next(store, "other", others) is None
            assert store.ask_for_split("big", "other", others) is None
        with_it = Serves.of("big", {key: name, f"{key}/{own}": name})
        work = found(claim_next(store, "w", with_it))
        assert (work.lease.job_id, work.numeric_class) == (f"of-{proposer['kind']}", name)
        store.request_cancel(work.lease.job_id)
    ingest(store, job_id="of-text", spec={**spec, "proposer": "o/draft"})
    assert found(claim_next(store, "w", serving(F32))).lease.job_id == "of-text"


def test_a_class_is_written_once(store: Store) -> None:
    ingest(store)
    assert claim_next(store, "w", serving(F32))
    assert claim_next(store, "other", serving(TORCH)) is None
    assert claim_group(store, 0, "other", serving(TORCH)) is None
    assert claim_group(store, 1, "other", serving(TORCH)) is None
    assert pinned(store) == F32
    assert claim_next(store, "third", serving(F32))


def test_a_refused_claim_changes_nothing(store: Store) -> None:
    ingest(store)
    first = found(claim_group(store, 0, "w", serving(F32))).lease
    assert claim_group(store, 1, "other", serving(TORCH)) is None
    second = found(claim_group(store, 1, "w", serving(F32))).lease
    assert (first.token, first.attempt) == (second.token, second.attempt) == (1, 1)


def test_the_class_of_most_live_workers_is_pinned_whoever_asks_first(store: Store) -> None:
    announce(store, "one", serving(F32))
    for owner in ("two", "three"):
        announce(store, owner, serving(TORCH))
    ingest(store)
    assert claim_next(store, "one", serving(F32)) is None, "it is not of the class that is pinned"
    assert pinned(store) == TORCH
    assert claim_next(store, "two", serving(TORCH))


def test_of_equally_many_that_of_who_asks_is_pinned(store: Store) -> None:
    announce(store, "one", serving(F32))
    announce(store, "two", serving(TORCH))
    ingest(store)
    assert claim_next(store, "two", serving(TORCH))
    assert pinned(store) == TORCH


def test_who_is_gone_silent_or_has_another_model_does_not_count(store: Store, clock: Clock) -> None:
    announce(store, "silent", serving(TORCH))
    announce(store, "too", serving(TORCH))
    clock.advance(LEASE_SEC + 1)
    for owner in ("gone", "and gone"):
        announce(store, owner, serving(TORCH))
        store.end_session(SessionTime(f"session-{owner}", 1), {})
    for owner in ("elsewhere", "there"):
        announce(store, owner, serving(TORCH, model="another"))
    announce(store, "proposes", None)
    ingest(store)
    assert claim_next(store, "one", serving(F32))
    assert pinned(store) == F32


def test_auto_is_what_most_workers_make_of_it(store: Store) -> None:
    mixed = Serves.of(
        "big",
        {
            engine_key("auto", "bitwise", "as-is"): BF16,
            engine_key("bfloat16", "bitwise", "as-is"): BF16,
            engine_key("float32", "bitwise", "as-is"): F32,
        },
    )
    ingest(store)
    assert found(claim_next(store, "w", mixed)).numeric_class == BF16
    only_f32 = serving(F32)
    assert claim_next(store, "w2", only_f32) is None


def test_a_spec_names_a_class(store: Store) -> None:
    ingest(store, numeric_class=TORCH)
    assert claim_next(store, "w", serving(F32)) is None
    assert claim_group(store, 0, "w", serving(F32)) is None
    assert pinned(store) == TORCH
    assert found(claim_next(store, "w", serving(TORCH))).numeric_class == TORCH


def test_any_worker_goes_on_with_a_job_of_an_unknown_class(store: Store) -> None:
    ingest(store, numeric_class=UNKNOWN)
    assert found(claim_next(store, "w", serving(F32))).numeric_class == UNKNOWN
    assert found(claim_next(store, "w2", serving(TORCH))).numeric_class == UNKNOWN
    assert pinned(store) == UNKNOWN


def test_a_job_whose_class_nobody_here_has_holds_up_no_other_job(store: Store) -> None:
    ingest(store, numeric_class=TORCH)
    ingest(store, job_id="job00001", numeric_class=None)
    assert found(claim_next(store, "w", serving(F32))).lease.job_id == "job00001"
    assert store.get_job("job00001").numeric_class == F32


def test_proposing_and_recording_ask_for_no_class(store: Store) -> None:
    ingest(store, groups=1, first_stage=Stage.PROPOSE, numeric_class=TORCH)
    work = found(store.claim_next(Stage.PROPOSE, "small", "p", LEASE_SEC))
    store.advance(work.lease, Stage.VERIFY, None, NO_TIME)
    assert found(claim_next(store, "w", serving(TORCH)))


def test_many_that_claim_at_once_agree_on_one_class(store: Store) -> None:
    ingest(store, groups=8)
    names = [F32, TORCH] * 4
    calls = [
        partial(store.claim_next, Stage.VERIFY, "big", f"w{n}", LEASE_SEC, serving(name))
        for n, name in enumerate(names)
    ]
    works = successes(together(*calls))
    chosen = pinned(store)
    assert chosen in names
    assert {work.numeric_class for work in works if work} == {chosen}
    for work, name in zip(works, names, strict=True):
        assert work is None or name == chosen


def test_who_cannot_verify_a_job_asks_for_no_part_of_its_groups(store: Store) -> None:
    ingest(store, groups=1)
    assert claim_next(store, "w", serving(F32))
    assert store.ask_for_split("big", "idle", serving(TORCH)) is None
    assert store.ask_for_split("big", "idle", serving(F32)) == (JOB, 0)


def test_what_is_due_for_another_class_keeps_nobody_from_asking(store: Store) -> None:
    ingest(store, groups=1)
    assert claim_next(store, "w", serving(F32))
    ingest(store, job_id="job00001", numeric_class=TORCH)
    assert store.ask_for_split("big", "idle", serving(F32)) == (JOB, 0)


# --- moving ---------------------------------------------------------------------------------


def test_a_job_that_goes_on_is_moved(store: Store) -> None:
    ingest(store, groups=3)
    held = found(claim_group(store, 0, "w", serving(F32))).lease
    assert store.retry_job(JOB, numeric_class=TORCH) == 3
    assert pinned(store) == TORCH
    assert store.get_job(JOB).state is JobState.RUNNING
    with pytest.raises(FencedError):
        store.advance(held, Stage.RECORD, RESULTS, NO_TIME)
    assert claim_next(store, "w", serving(F32)) is None
    work = found(claim_group(store, 0, "w2", serving(TORCH)))
    assert (work.numeric_class, work.lease.attempt) == (TORCH, 1)


def test_finished_results_stay_when_a_job_is_moved(store: Store) -> None:
    ingest(store, groups=2)
    lease = verified(store, 0)
    assert store.retry_job(JOB, numeric_class=TORCH) == 1
    commit(store, lease)
    assert {record.numeric_class for record in store.completions(JOB)} == {F32}


def test_to_the_class_that_it_has_a_job_is_not_moved(store: Store) -> None:
    ingest(store)
    lease = found(claim_next(store, "w", serving(F32))).lease
    assert store.retry_job(JOB, numeric_class=F32) == 0
    store.advance(lease, Stage.RECORD, RESULTS, NO_TIME)


def test_a_job_that_is_being_stopped_is_not_moved(store: Store) -> None:
    ingest(store)
    assert claim_next(store, "w", serving(F32))
    store.request_cancel(JOB)
    with pytest.raises(UsageError, match="is being stopped"):
        store.retry_job(JOB, numeric_class=TORCH)


@pytest.mark.parametrize("name", ["", "exact", "exact/f64/1", "unknown", "EXACT/f32/1", "x/f32/"])
def test_what_is_no_class_is_refused(store: Store, name: str) -> None:
    ingest(store)
    with pytest.raises(UsageError, match="is not a numeric class"):
        store.retry_job(JOB, numeric_class=name)


def test_a_class_of_another_dtype_than_the_job_asks_for_is_refused(store: Store) -> None:
    ingest(store, spec={"engine": {"dtype": "float32"}})
    with pytest.raises(UsageError, match="computes in bfloat16"):
        store.retry_job(JOB, numeric_class=BF16)


# --- what is kept of it ---------------------------------------------------------------------


def kinds(store: Store) -> Sequence[tuple[str, str]]:
    return [(e.kind, e.actor) for e in store.log(JOB) if e.kind == EntryKind.PINNED]


def test_the_log_says_who_pinned_and_who_moved(store: Store) -> None:
    ingest(store)
    assert claim_next(store, "w", serving(F32))
    store.retry_job(JOB, numeric_class=TORCH)
    assert [kind for kind, _ in kinds(store)] == ["pinned", "pinned"]
    assert kinds(store)[0][1] == "w"


def test_sessions_and_the_backlog_tell_what_workers_serve(store: Store) -> None:
    serves = Serves.of("big", {"auto/bitwise/as-is": F32}, {F32: {"engine": "exact"}})
    announce(store, "w", serves)
    announce(store, "p", None)
    told = {row.owner: row.serves for row in store.sessions()}
    assert told == {"w": serves, "p": None}
    assert told["w"] is not None
    assert told["w"].facts == {F32: {"engine": "exact"}}
    assert {worker.owner: worker.serves for worker in store.backlog().workers} == told


def test_an_ended_job_is_retried_in_another_class(store: Store) -> None:
    ingest(store, groups=2)
    lease = found(claim_group(store, 0, "w", serving(F32))).lease
    store.request_cancel(JOB)
    store.cancel_group(lease)
    finish(store, JobState.CANCELLED)
    assert store.retry_job(JOB, numeric_class=TORCH) == 2
    assert pinned(store) == TORCH
    assert claim_next(store, "w", serving(F32)) is None
    assert claim_next(store, "w", serving(TORCH))
