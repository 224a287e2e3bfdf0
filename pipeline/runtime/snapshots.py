"""Which snapshot of a table a job reads: pinned when it is submitted, and kept in its spec.

Where the submitter cannot read the table (it has not the library, or not the rights), ingest pins
the snapshot before it reads the first row, and keeps it in the job's report.
"""

from __future__ import annotations

from collections.abc import Iterator

from specbatch.pipeline.inputs.tables import can_read_tables, pin
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import InUseError, ObjectError, UsageError
from specbatch.schemas.records import JobRow, JobState
from specbatch.schemas.serving import Page
from specbatch.schemas.spec import InputSpec, JobSpec
from specbatch.schemas.table_spec import OUTPUT_SNAPSHOT, Snapshot

PAGE = 100  # jobs that are asked for at once

_HAS_READ = (JobState.DONE, JobState.PARTIAL)


def spec_at_submission(
    store: Store, objects: Objects, privacy: Privacy, spec: JobSpec, key: str | None
) -> JobSpec:
    """The spec of a new job with its snapshot pinned, or without where this machine cannot read the
    table. One that an idempotency key has made before keeps its own.

    Raises `UsageError` and `InUseError`.
    """
    if spec.input.table is None or not can_read_tables(spec.input):
        return spec
    kept = privacy.idempotency_key(spec.tenant, key)
    if kept and store.job_of_key(kept) is not None:
        return spec
    name = privacy.sentence(spec.tenant, spec.name)  # as the store has it
    try:
        found = pin(spec.input, objects, lambda: last_read(store, spec.input, spec.tenant, name))
    except ObjectError:
        return spec
    return spec.model_copy(update={"input": spec.input.pinned_to(found)})


def snapshot_of(job: JobRow) -> Snapshot | None:
    """What a job reads of its table, if that is pinned yet."""
    kept = job.spec.get("input") or {}
    if (number := kept.get("pinned_snapshot")) is not None:
        return Snapshot(number, kept.get("pinned_since"), kept.get("pinned_table"))
    return Snapshot.of_report(job.report)


def last_read(
    store: Store, spec: InputSpec, tenant: str, name: str, but: str | None = None
) -> Snapshot | None:
    """What the last finished job of this name has read of this table; None: there is none.

    `but`: the job that asks, which follows only those that were submitted before it. Raises
    `UsageError` where what one of them reads would be done twice, or not at all, and `InUseError`
    while one is being cancelled.
    """
    for job in _newest_first(store, tenant, name, but):
        if (job.spec.get("input") or {}).get("uri") != spec.uri:
            continue
        if job.state not in _HAS_READ:
            _check_undone(job, spec)
        elif (snapshot := snapshot_of(job)) is not None:
            return snapshot
    return None


def _newest_first(store: Store, tenant: str, name: str, before: str | None) -> Iterator[JobRow]:
    """All of the tenant's jobs of a name."""
    while jobs := store.tenant_jobs(tenant, Page(PAGE, before), name=name):
        yield from jobs
        before = jobs[-1].job_id


def _check_undone(job: JobRow, spec: InputSpec) -> None:
    """Raise unless a job of this name has ended and left nothing in the output table."""
    if not job.state.is_final and job.cancel_requested:
        raise InUseError(
            f"job {job.job_id} of this name is being cancelled, and since {spec.since} follows "
            "it: wait for its end"
        )
    if not job.state.is_final:
        raise UsageError(
            f"job {job.job_id} of this name is {job.state}, and since {spec.since} follows "
            "it: wait for its end, or cancel it"
        )
    if OUTPUT_SNAPSHOT in job.report:
        raise UsageError(
            f"job {job.job_id} of this name is {job.state}, and its rows are in the table: "
            "`specbatch retry` it, or name since"
        )
