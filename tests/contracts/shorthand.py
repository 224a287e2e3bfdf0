"""What tests of the stores say often."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from threading import Barrier
from typing import Any, TypeVar

import orjson
from ledger.builders import (
    JOB,
    LEASE_SEC,
    NO_TIME,
    RESULTS,
    completion,
    new_group,
    new_job,
    position,
)

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.audit import PublishedManifest
from specbatch.schemas.numeric_class import Serves, all_keys
from specbatch.schemas.provenance import Provenance
from specbatch.schemas.records import (
    GroupWork,
    JobState,
    JobWork,
    Lease,
    RejectedRow,
    Stage,
)
from specbatch.schemas.speculation import VOCABULARY

T = TypeVar("T")
# What lies there, `ledger.audited.Published` says: an output without a file.
MANIFEST_BYTES = orjson.dumps({"job_id": JOB, "parts": []})
MANIFEST = PublishedManifest("file:///out/manifest.json", sha256(MANIFEST_BYTES).hexdigest())
F32, TORCH = "exact/f32/1", "torch/f32/0badcafe"  # numeric classes
DRAFTED = Provenance((3,), (5,), ("ngram",), (0,), (2,), (8,))


def found(work: T | None) -> T:
    assert work is not None, "the claim was refused"
    return work


def serving(name: str, model: str = "big") -> Serves:
    """A worker that runs every job in one class."""
    return Serves.of(model, dict.fromkeys(all_keys(), name))


def claim_job(store: Store, stage: Stage, owner: str = "ingester", job_id: str = JOB) -> JobWork:
    return found(store.claim_job(job_id, stage, owner, LEASE_SEC))


def claim(store: Store, index: int, stage: Stage = Stage.VERIFY, owner: str = "w1") -> GroupWork:
    return found(store.claim_group(JOB, index, stage, owner, LEASE_SEC))


def ingest(
    store: Store,
    groups: int = 2,
    first_stage: Stage = Stage.VERIFY,
    rows: int = 4,
    job_id: str = JOB,
    **job: Any,
) -> None:
    """A job whose input is read: `groups` groups of `rows` rows."""
    store.create_job(new_job(job_id, **job))
    lease = claim_job(store, Stage.INGEST, job_id=job_id).lease
    planned = [new_group(index, rows, first_stage) for index in range(groups)]
    store.add_groups(lease, planned, [], groups * rows, position(groups * rows))
    store.finish_ingest(lease, groups * rows, {})


def verified(store: Store, index: int, owner: str = "w1") -> Lease:
    """The lease of a group that is ready to be committed."""
    lease = claim(store, index, Stage.VERIFY, owner).lease
    store.advance(lease, Stage.RECORD, RESULTS, NO_TIME)
    return claim(store, index, Stage.RECORD, owner).lease


def commit(store: Store, lease: Lease, **report: float) -> None:
    assert lease.group_index is not None
    rows = range(lease.group_index * 4, lease.group_index * 4 + 4)
    store.commit_group(lease, [completion(row) for row in rows], NO_TIME, report)


def finish(
    store: Store,
    state: JobState = JobState.DONE,
    manifest: PublishedManifest | None = MANIFEST,
    owner: str = "ingester",
) -> None:
    store.finish_job(claim_job(store, Stage.PUBLISH, owner).lease, state, None, manifest)


def stage_of(store: Store) -> Stage:
    return store.get_job(JOB).stage


def ended(
    store: Store, job_id: str = JOB, state: JobState = JobState.DONE, **values: object
) -> None:
    """A job of one group that is over, with a row that was rejected."""
    store.create_job(new_job(job_id, sealed_spec='{"name": "whole"}', **values))
    work = store.claim_job(job_id, Stage.INGEST, "w", 60.0)
    assert work is not None
    bad = RejectedRow(4, "anna", "bad_id", "an id 'anna'")
    store.add_groups(work.lease, [new_group(0)], [bad], 5, position(5))
    store.finish_ingest(work.lease, 5, {VOCABULARY: "v"})
    group = store.claim_group(job_id, 0, Stage.VERIFY, "w", 60.0)
    assert group is not None
    store.advance(group.lease, Stage.RECORD, group.prompts, NO_TIME)
    group = store.claim_group(job_id, 0, Stage.RECORD, "w", 60.0)
    assert group is not None
    records = [completion(row, provenance=DRAFTED, error="an error") for row in range(4)]
    store.commit_group(group.lease, records, NO_TIME, {})
    last = store.claim_job(job_id, Stage.PUBLISH, "w", 60.0)
    assert last is not None
    store.finish_job(last.lease, state)


def exhaust(store: Store, index: int, stage: Stage = Stage.VERIFY) -> None:
    """Use up a group's attempts with errors that are no row's fault."""
    for attempt in range(3):
        store.release(claim(store, index, stage).lease, f"out of memory {attempt}", whole=True)


def together(*calls: Callable[[], T]) -> list[T | Exception]:
    """The results (or errors) of calls that begin at the same moment in threads of their own."""
    barrier = Barrier(len(calls))

    def run(call: Callable[[], T]) -> T | Exception:
        barrier.wait()
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def successes(results: list[T | Exception]) -> list[T]:
    """The results, none of which may be an error."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results  # type: ignore[return-value]  # the loop has just shown it
