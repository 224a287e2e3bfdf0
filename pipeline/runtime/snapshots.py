"""Which snapshot of a table a job reads: pinned when it is submitted, and kept in its spec.

Where the submitter cannot read the table (it has not the library, or not the rights), ingest pins
the snapshot before it reads the first row, and keeps it in the job's report.
"""

from __future__ import annotations

from specbatch.pipeline.inputs.tables import can_read_tables, pin
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import ObjectError, UsageError
from specbatch.schemas.records import JobRow, JobState
from specbatch.schemas.spec import InputSpec, JobSpec
from specbatch.schemas.table_spec import Snapshot

LOOKED_AT = 1000  # jobs among which the last one of a name is searched

_HAS_READ = (JobState.DONE, JobState.PARTIAL)


def spec_at_submission(
    store: Store, objects: Objects, privacy: Privacy, spec: JobSpec, key: str | None
) -> JobSpec:
    """The spec of a new job with its snapshot pinned, or without where this machine cannot read the
    table. One that an idempotency key has made before keeps its own.

    Raises `UsageError`.
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
        return Snapshot(number, kept.get("pinned_since"))
    return Snapshot.of_report(job.report)


def last_read(
    store: Store, spec: InputSpec, tenant: str, name: str, but: str | None = None
) -> Snapshot | None:
    """What the last finished job of this name has read of this table; None: there is none.

    `but`: the job that asks. Raises `UsageError` while one of them is not finished: what it reads
    would be done twice, or not at all.
    """
    for job in store.list_jobs(LOOKED_AT):
        uri = (job.spec.get("input") or {}).get("uri")
        if (job.tenant, job.name, uri) != (tenant, name, spec.uri) or job.job_id == but:
            continue
        if not job.state.is_final:
            raise UsageError(
                f"job {job.job_id} of this name is {job.state}, and since {spec.since} follows "
                "it: wait for its end, or cancel it"
            )
        if job.state in _HAS_READ and (snapshot := snapshot_of(job)) is not None:
            return snapshot
    return None
