"""Fingerprints of models on both databases: pinned once, compared by every claim, and accepted
anew on purpose."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contracts.shorthand import (
    F32,
    TORCH,
    claim_job,
    found,
    ingest,
    serving,
)
from ledger.builders import JOB, LEASE_SEC, NO_TIME, RESULTS, new_group, new_job, position

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.errors import FencedError, ModelChangedError, UsageError
from specbatch.schemas.fingerprint import NONE, PARTS, Fingerprint, Models
from specbatch.schemas.numeric_class import UNKNOWN, Serves
from specbatch.schemas.records import GroupWork, Lease, Stage
from specbatch.schemas.timekeeping import Device, NewSession

DRAFT, OTHER_DRAFT = "d" * 32, "e" * 32


def model(**parts: str) -> Fingerprint:
    """A model whose parts are these, the others being absent."""
    named = {name.replace("_", " "): digest for name, digest in parts.items()}
    return Fingerprint.of(dict.fromkeys(PARTS, NONE) | named)


OLD, NEW = model(weights="aa"), model(weights="bb")
OTHER_TEXT = model(weights="aa", tokenizer="cc")


def worker(
    fingerprint: Fingerprint | None, name: str = F32, drafts: tuple[str, ...] = ()
) -> Serves:
    return replace(serving(name), fingerprint=fingerprint, drafts=drafts)


def begin(store: Store, models: Models | None = None, **job: object) -> Lease:
    """A job whose input is begun with these models."""
    store.create_job(new_job(**job))
    lease = claim_job(store, Stage.INGEST).lease
    store.pin_models(lease, models or Models(OLD))
    return lease


def read(store: Store, models: Models | None = None, groups: int = 2, **job: object) -> None:
    lease = begin(store, models, **job)
    store.add_groups(lease, [new_group(i) for i in range(groups)], [], 8, position(8))
    store.finish_ingest(lease, 8, {})


def claim_next(store: Store, serves: Serves, owner: str = "w") -> GroupWork | None:
    return store.claim_next(Stage.VERIFY, "big", owner, LEASE_SEC, serves)


def claim_group(store: Store, index: int, serves: Serves) -> GroupWork | None:
    return store.claim_group(JOB, index, Stage.VERIFY, "w", LEASE_SEC, serves)


def test_ingest_pins_a_model_and_its_parts(store: Store) -> None:
    begin(store)
    job = store.get_job(JOB)
    assert (job.model_fingerprint, job.model_parts) == (OLD.digest, OLD.parts)
    assert job.proposer_fingerprint is None


def test_a_pin_is_written_once(store: Store) -> None:
    lease = begin(store)
    store.pin_models(lease, Models(OLD))
    with pytest.raises(ModelChangedError, match="has other weights "):
        store.pin_models(lease, Models(NEW))
    assert store.get_job(JOB).model_fingerprint == OLD.digest
    assert [entry.kind for entry in store.log(JOB)].count(EntryKind.PINNED) == 1


def test_only_who_holds_the_input_pins(store: Store) -> None:
    lease = begin(store)
    store.release(lease, "again", forgiven=True)
    with pytest.raises(FencedError):
        store.pin_models(lease, Models(OLD))


def test_a_model_that_the_spec_names_is_pinned_from_the_start(store: Store) -> None:
    store.create_job(new_job(model_fingerprint=OLD.digest))
    assert store.get_job(JOB).model_fingerprint == OLD.digest
    lease = claim_job(store, Stage.INGEST).lease
    with pytest.raises(ModelChangedError, match="has other files"):
        store.pin_models(lease, Models(NEW))
    store.pin_models(lease, Models(OLD))
    assert store.get_job(JOB).model_parts == OLD.parts


def test_claims_leave_a_job_to_workers_with_its_model(store: Store) -> None:
    read(store)
    for stranger in (worker(NEW), worker(None)):
        assert claim_next(store, stranger) is None
        assert claim_group(store, 0, stranger) is None
        assert store.ask_for_split("big", "idle", stranger) is None
    assert store.get_job(JOB).numeric_class is None, "who may not verify it pins no class"
    work = found(claim_next(store, worker(OLD)))
    assert (work.model_fingerprint, work.numeric_class, work.lease.attempt) == (OLD.digest, F32, 1)
    assert store.ask_for_split("big", "idle", worker(NEW)) is None
    assert found(claim_group(store, 1, worker(OLD))).model_fingerprint == OLD.digest


def test_a_job_of_another_model_holds_up_no_other_job(store: Store) -> None:
    read(store)
    ingest(store, job_id="job00001")
    assert found(claim_next(store, worker(NEW))).lease.job_id == "job00001"


def test_a_class_is_chosen_among_workers_that_have_the_model(store: Store) -> None:
    device = Device("cpu", "here", "owned", 1)
    for owner in ("one", "two"):
        store.begin_session(NewSession(owner, owner, device, 0, worker(NEW, TORCH)))
    read(store)
    assert found(claim_next(store, worker(OLD))).numeric_class == F32


@pytest.mark.parametrize("fingerprint", [None, UNKNOWN])
def test_any_worker_goes_on_with_a_job_of_before(store: Store, fingerprint: str | None) -> None:
    ingest(store, model_fingerprint=fingerprint)
    assert claim_next(store, worker(OLD))
    assert claim_next(store, worker(None))


def test_a_job_of_before_stays_without_a_pin(store: Store) -> None:
    begin(store, Models(NEW), model_fingerprint=UNKNOWN)
    assert store.get_job(JOB).model_fingerprint == UNKNOWN


def test_a_draft_model_counts_only_where_it_is_pinned(store: Store) -> None:
    read(store, Models(OLD, DRAFT))
    assert claim_next(store, worker(OLD)) is None
    assert claim_next(store, worker(OLD, drafts=(OTHER_DRAFT,))) is None
    work = found(claim_next(store, worker(OLD, drafts=(DRAFT, OTHER_DRAFT))))
    assert work.proposer_fingerprint == DRAFT


def test_another_draft_model_is_refused_by_ingest_where_it_counts(store: Store) -> None:
    lease = begin(store, Models(OLD, DRAFT))
    with pytest.raises(ModelChangedError, match="draft model"):
        store.pin_models(lease, Models(OLD, OTHER_DRAFT))


# --- accepting another model ----------------------------------------------------------------


def test_a_job_that_goes_on_is_given_another_model(store: Store) -> None:
    read(store)
    held = found(claim_group(store, 0, worker(OLD))).lease
    assert store.retry_job(JOB, models=Models(NEW)) == 2
    job = store.get_job(JOB)
    assert (job.model_fingerprint, job.model_parts) == (NEW.digest, NEW.parts)
    with pytest.raises(FencedError):
        store.advance(held, Stage.RECORD, RESULTS, NO_TIME)
    assert claim_next(store, worker(OLD)) is None
    assert found(claim_next(store, worker(NEW))).lease.attempt == 1
    assert store.retry_job(JOB, models=Models(NEW)) == 0, "it has that model already"


def test_prompts_that_would_be_other_tokens_are_refused(store: Store) -> None:
    read(store)
    with pytest.raises(UsageError, match="tokens of another tokenizer; submit it as a new job"):
        store.retry_job(JOB, models=Models(OTHER_TEXT))
    assert store.get_job(JOB).model_fingerprint == OLD.digest


def test_before_there_are_prompts_any_model_is_accepted(store: Store) -> None:
    lease = begin(store)
    store.release(lease, "its files changed", forgiven=True)
    store.retry_job(JOB, models=Models(OTHER_TEXT))
    assert store.get_job(JOB).model_fingerprint == OTHER_TEXT.digest


# --- what is told ---------------------------------------------------------------------------


def waiting(store: Store) -> str | None:
    return store.backlog().waiting().get(JOB)


def announce(store: Store, owner: str, serves: Serves) -> None:
    store.begin_session(NewSession(owner, owner, Device("cpu", "", "", 1), 0, serves))


def test_a_job_that_nobody_can_do_says_so(store: Store) -> None:
    read(store)
    assert waiting(store) == "waits for a worker with model `big`; alive: none"
    announce(store, "elsewhere", replace(worker(OLD), model="small"))
    assert waiting(store) == "waits for a worker with model `big`; alive: `small`"
    announce(store, "w", worker(NEW))
    assert waiting(store) == (
        f"waits for a worker with model fingerprint {OLD.digest[:12]}; "
        f"alive: w with {NEW.digest[:12]} (other weights)"
    )
    announce(store, "w2", worker(OLD))
    assert waiting(store) is None


def test_a_draft_model_that_is_missing_is_named(store: Store) -> None:
    read(store, Models(OLD, DRAFT))
    announce(store, "w", worker(OLD, drafts=(OTHER_DRAFT,)))
    assert waiting(store) == (
        f"waits for a worker with draft model fingerprint {DRAFT[:12]}; alive: {OTHER_DRAFT[:12]}"
    )


def test_what_a_worker_serves_may_change(store: Store) -> None:
    announce(store, "w", worker(OLD))
    store.announce("w", worker(NEW))
    store.announce("nobody", worker(NEW))
    [session] = store.sessions()
    assert session.serves == worker(NEW)
    assert session.serves.fingerprint is not None
    assert session.serves.fingerprint.parts == NEW.parts


def test_why_an_input_was_given_back_is_kept(store: Store) -> None:
    lease = begin(store)
    assert store.get_job(JOB).last_error is None
    store.release(lease, "its files changed", forgiven=True)
    assert store.get_job(JOB).last_error == "its files changed"
