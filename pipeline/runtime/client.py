"""Submits jobs, follows them, stops them. Needs the store and the broker but no engine.

The commands use it, and so does everything that runs inside another scheduler.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing

from specbatch.pipeline.inputs.token_bounds import least_tokens
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.observe.tracing.context import CurrentWork, work_on
from specbatch.pipeline.observe.tracing.span_names import SUBMIT
from specbatch.pipeline.observe.tracing.tracing import UNTRACED, Tracing
from specbatch.pipeline.policy.costs.stage_costs import stage_costs, total_usd
from specbatch.pipeline.privacy.tenants import NOBODY_PRIVATE, Privacy
from specbatch.pipeline.runtime.leases import is_dead_here
from specbatch.schemas.backlog import is_interrupted
from specbatch.schemas.errors import UsageError, WaitTimeoutError
from specbatch.schemas.fingerprint import Models
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.lineage import parent_here
from specbatch.schemas.policies import Decided, Place
from specbatch.schemas.records import (
    PRIORITIES,
    DueWork,
    JobRow,
    JobState,
    NewJob,
    Stage,
)
from specbatch.schemas.spec import JobSpec

Enqueue = Callable[[DueWork], None]  # sends a work message for the unit


class Client:
    """What a submitter can do. Where `enqueue` fails, the sweeper enqueues later."""

    def __init__(
        self,
        store: Store,
        enqueue: Enqueue,
        workspace_uri: str,
        on_cancel: Callable[[], None] = lambda: None,
        privacy: Privacy = NOBODY_PRIVATE,
        tracing: Callable[[], Tracing] = lambda: UNTRACED,
        pinned: Callable[[JobSpec, str | None], JobSpec] = lambda spec, _key: spec,
    ) -> None:
        """`on_cancel` makes the workers of this process check at once which jobs must stop.

        `tracing` opens the exporter for a submission's span. `pinned` pins the snapshot of a table
        that a spec (with an idempotency key) reads."""
        self._pinned = pinned
        self._tracing = tracing
        self._privacy = privacy
        self._store = store
        self._enqueue = enqueue
        self._workspace_uri = workspace_uri
        self._on_cancel = on_cancel

    def submit(
        self, spec: JobSpec, idempotency_key: str | None = None, rows: int = 1
    ) -> tuple[JobRow, bool]:
        """Create the job, or find the one this key made; True when it is new. `rows`: known ones.

        Raises `IdempotencyError` when the key was used for another spec, and `OverBudgetError`.
        """
        with closing(self._tracing()) as tracing:
            begun_ns = time.time_ns()
            job, created = self._create(spec, idempotency_key, rows)
            work_on(CurrentWork(job.job_id, SUBMIT))
            tracing.submitted(job, created, begun_ns)
            if not job.state.is_final:
                stage = job.stage if created else Stage.INGEST
                self._enqueue(DueWork(job.job_id, stage, None, priority=job.priority))
        return job, created

    def _create(self, spec: JobSpec, idempotency_key: str | None, rows: int) -> tuple[JobRow, bool]:
        job_id = new_job_id()
        if spec.lineage_parent is None:
            spec = spec.model_copy(update={"lineage_parent": parent_here()})
        order = self._privacy.as_stored(
            NewJob(
                job_id=job_id,
                name=spec.name,
                tenant=spec.tenant,
                spec=self._pinned(spec, idempotency_key).model_dump(mode="json"),
                spec_digest=spec.digest(),
                verifier=spec.verifier,
                proposer=spec.proposer_name if spec.speculation.enabled else None,
                output_uri=spec.output.uri,
                workspace_uri=f"{self._workspace_uri.rstrip('/')}/jobs/{job_id}",
                idempotency_key=idempotency_key,
                priority=PRIORITIES.index(spec.priority),
                deadline_sec=spec.deadline_sec,
                budget_usd=spec.budget_usd,
                numeric_class=spec.engine.numeric_class,
                model_fingerprint=spec.model_fingerprint,
                least=least_tokens(spec, rows),
            )
        )
        return self._store.create_job(order)

    def job(self, job_id: str) -> JobRow:
        return self._store.get_job(job_id)

    def is_keys_job(self, job_id: str, key: str) -> bool:
        """Whether it is the job that was submitted with this idempotency key.

        Raises `JobNotFoundError`.
        """
        job = self._store.get_job(job_id)
        return job.idempotency_key == self._privacy.idempotency_key(job.tenant, key)

    def find(self, tenant: str, key: str) -> JobRow | None:
        """The tenant's job that was submitted with this idempotency key, if one was."""
        kept = self._privacy.idempotency_key(tenant, key)
        return self._store.job_of_key(kept) if kept else None

    def jobs(self, limit: int = 50, state: JobState | None = None) -> list[JobRow]:
        return self._store.list_jobs(limit, state)

    def progress(self, job_id: str) -> JobProgress:
        return self._store.progress(job_id)

    def spent_usd(self, job_id: str) -> float:
        """All that a job has cost: its devices, and what else has a price."""
        times, usage = self._store.job_times(job_id), self._store.stage_usage(job_id)
        return total_usd(stage_costs(times, usage))

    def cancel(self, job_id: str, reason: str = "cancelled on request") -> JobRow:
        """Stop a job; its finished rows are kept. `reason` says who asked, in words."""
        found = self._store.get_job(job_id)
        words = self._privacy.words(found, reason)
        job = self._store.request_cancel(found.job_id, words)
        self._on_cancel()
        self._enqueue_due(job.job_id)
        return job

    def retry(
        self,
        job_id: str,
        quarantined: bool = False,
        numeric_class: str | None = None,
        models: Models | None = None,
    ) -> int:
        """Do again what failed or was cancelled; returns how many units.

        `quarantined`: only rows that failed by themselves, one unit each. `numeric_class`,
        `models`: move the job to these, also one that is still running.
        """
        job = self._store.get_job(job_id)
        if not job.state.is_final and numeric_class is None and models is None:
            raise UsageError(
                f"job {job.job_id} is still {job.state}: wait for it or cancel it first"
            )
        count = self._store.retry_job(job.job_id, quarantined, numeric_class, models)
        self._enqueue_due(job.job_id)
        return count

    def review(self, job_id: str, decided: Mapping[Place, Decided], by: str = "") -> None:
        """Decide on completions that policies hold back; the output is published again with them.
        `by` is whom the audit log names; empty: who this process works for.

        Raises `UsageError` for one that is not held, or was decided on.
        """
        job = self._store.get_job(job_id)
        self._store.review_job(job.job_id, decided, by)
        self._enqueue_due(job.job_id)

    def interrupted(self, jobs: Sequence[JobRow], lease_sec: float) -> list[str]:
        """Ids of the jobs that were begun and that no worker works on any more."""
        begun = [job for job in jobs if job.state is JobState.RUNNING]
        workers = self._store.backlog().workers if begun else ()
        held = self._store.holders_of([job.job_id for job in begun]) if begun else {}

        def holders(job_id: str) -> Sequence[str]:
            return held.get(job_id, ())

        return [j.job_id for j in begun if is_interrupted(j, holders, workers, lease_sec)]

    def take_over(self, job_id: str) -> None:
        """End the leases of this machine's dead processes. Otherwise resuming the job would wait
        until they expire."""
        for owner in self._store.holders(job_id):
            if is_dead_here(owner):
                self._store.expire_leases(job_id, owner)

    def waits_for(self, job_id: str, silence_sec: float) -> str | None:
        """In words, what the job waits for and which workers there are; None: it waits for nothing.

        Workers that were not heard of for `silence_sec` count as dead."""
        return self._store.backlog().waiting(silence_sec).get(job_id)

    def models_alive(self, job_id: str, silence_sec: float) -> list[Models]:
        """The models that live workers serve where these differ from the job's."""
        job = self._store.get_job(job_id)
        alive = self._store.backlog().alive(silence_sec).workers
        serving = [worker.serves for worker in alive if worker.serves is not None]
        found: dict[str, Models] = {}
        for serves in serving:
            here, drafts = serves.fingerprint, serves.drafts
            if serves.model != job.verifier or here is None or not serves.works_on(job.job_id):
                continue
            wanted = job.proposer_fingerprint
            draft = wanted if wanted in (None, *drafts) or len(drafts) != 1 else drafts[0]
            if (here.digest, draft) != (job.model_fingerprint, wanted):
                found.setdefault(here.digest, Models(here, draft))
        return [found[digest] for digest in sorted(found)]

    def follow(
        self, job_id: str, every_sec: float = 0.5, timeout_sec: float | None = None
    ) -> Iterator[JobProgress]:
        """Progress until the job ends. Raises `WaitTimeoutError`; the job then keeps running."""
        deadline = None if timeout_sec is None else time.monotonic() + timeout_sec
        while True:
            progress = self._store.progress(job_id)
            yield progress
            if progress.state.is_final:
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"job {job_id} is still {progress.state} after {timeout_sec:.0f} s; it keeps "
                    f"running, `specbatch show {job_id}` shows its progress"
                )
            time.sleep(every_sec)

    def _enqueue_due(self, job_id: str) -> None:
        for work in self._store.due(job_id=job_id):
            self._enqueue(work)


def new_job_id() -> str:
    """Sortable by time of creation, unguessable, safe in paths and queue names."""
    return f"{int(time.time() * 1000):011x}{secrets.token_hex(5)}"
