"""What the stages of one worker share. It is built once (`bootstrap.py`) and passed in.

A group's work needs only what never changes of a job (spec, tenant, models, workspace) and what is
there before its first group is (the history in the report), so `KnownJobs` reads a job once per
process and not once per group. State, stage, cancel flag and the rest of the report keep changing:
whoever needs them reads `fresh`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from specbatch.pipeline.engines.contract import Engines, ModelFolder, Ticket
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.inputs.rows import RowChecker
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.moderation.hooks import Hooks
from specbatch.pipeline.observe.tracing.tracing import UNTRACED, Tracing
from specbatch.pipeline.policy.costs.pricing import cost_units
from specbatch.pipeline.privacy.tenants import NOBODY_PRIVATE, Privacy
from specbatch.pipeline.runtime.anchors import Anchoring
from specbatch.pipeline.runtime.client import Enqueue
from specbatch.pipeline.runtime.device_time import Timing
from specbatch.pipeline.runtime.last_used import LastUsed
from specbatch.pipeline.runtime.leases import LeaseKeeper
from specbatch.pipeline.runtime.outage import Outage
from specbatch.pipeline.runtime.placer import Placer
from specbatch.pipeline.runtime.sweeper import Requeuer
from specbatch.pipeline.runtime.tokenizers import Tokenizers
from specbatch.pipeline.stages.draft_models import DraftModels
from specbatch.pipeline.stages.drafting import Drafting
from specbatch.pipeline.stages.readings import PausedReadings
from specbatch.pipeline.stages.refill import Refills
from specbatch.pipeline.stages.requests import GrammarOf
from specbatch.pipeline.stages.text_stop import Decode
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.workspace import name_of_attempt, put_own
from specbatch.schemas.crash_points import CrashPoint, reach
from specbatch.schemas.errors import UsageError
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.provenance import TICKS_PER_SEC
from specbatch.schemas.records import Artefact, DueWork, JobRow, Lease, Stage, StageTiming
from specbatch.schemas.spec import JobSpec, spec_of
from specbatch.schemas.timekeeping import usd_of

MOST_KNOWN = 64

Known = tuple[JobRow, JobSpec]


class KnownJobs:
    """Reads jobs from the store and keeps the ones used last. Thread-safe."""

    def __init__(self, store: Store, most: int = MOST_KNOWN) -> None:
        self._store = store
        self._known: LastUsed[str, Known] = LastUsed(most)

    def of_group(self, job_id: str) -> Known:
        """The job of a group that was just claimed. Raises `JobNotFoundError`."""
        reach(CrashPoint.LEASE)
        return self._known.get(job_id, lambda: self._read(job_id))

    def fresh(self, job_id: str) -> Known:
        """A job that was just claimed itself. It is not kept, for it is still unfinished."""
        reach(CrashPoint.LEASE)
        return self._read(job_id)

    def _read(self, job_id: str) -> Known:
        job = self._store.get_job(job_id)
        return job, spec_of(job)


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """What a worker of any kind works with; `proposing` and `verifying` are the engines it has."""

    store: Store
    objects: Objects
    lease_keeper: LeaseKeeper
    enqueue: Enqueue
    owner: str  # the name under which this process claims
    lease_sec: float
    price_microusd: int  # of an hour of this worker's device, in millionths of a dollar
    jobs: KnownJobs
    tokenizers: Tokenizers
    drafting: Drafting
    draft_models: DraftModels
    requeuer: Requeuer
    max_open_groups: int  # of a job, before its input is read on
    max_attempts: int
    reader_bytes: int
    paused: PausedReadings = field(default_factory=PausedReadings)
    proposing: Engines | None = None
    verifying: Engines | None = None
    models: Callable[[str], ModelFolder] = inspect_model
    tenant_depths: Mapping[str, int] = field(default_factory=dict)
    refills: Refills | None = None
    timing: Timing = field(default_factory=Timing)
    privacy: Privacy = NOBODY_PRIVATE
    tracing: Tracing = UNTRACED
    anchoring: Anchoring | None = None  # anchors the logs of published jobs
    only_job: str | None = None  # take work of no other job
    placer: Placer | None = None  # by price; None: jobs are left to nobody
    outage: Outage = field(default_factory=Outage)
    tells_lineage: bool = False  # ingest and publish note what OpenLineage is told
    hooks: Hooks = field(default_factory=Hooks)  # policies and scorers of other packages

    def engines(self, kind: str) -> Engines:
        """The engines to propose or to verify with. Raises `UsageError`, `DeviceLostError`."""
        host = self.proposing if kind == "propose" else self.verifying
        if host is None:
            raise UsageError(
                f"this worker has no engine to {kind} with: start `specbatch worker {kind}`"
            )
        host.check()  # nothing is claimed once the device is gone
        return host

    def decode(self, job: JobRow) -> Decode:
        """The job's detokenizer, loaded when it is first called."""
        tokenizer = cache(lambda: self.tokenizers.of_job(job))
        return lambda ids: tokenizer().decode(ids)

    def grammar_of(self, job: JobRow, vocab_size: int) -> GrammarOf:
        """Compiles what the job's rows ask of their outputs' form."""
        tokenizer = cache(lambda: self.tokenizers.of_job(job))
        return lambda form: tokenizer().grammar(form, vocab_size)

    def checker(self, job: JobRow, spec: JobSpec, verifier: ModelFolder) -> RowChecker:
        """Checks a job's input rows."""
        tokenizer = self.tokenizers.of_folder(verifier)
        return RowChecker(
            spec, tokenizer, verifier.context_tokens, verifier.vocab_size, today=job.created_at
        )

    def put(self, job: JobRow, kind: str, lease: Lease, data: bytes) -> Artefact:
        """Write a file of this attempt to the job's workspace."""
        return put_own(self.objects, job, name_of_attempt(kind, lease), data)

    def device_time(self, tickets: Sequence[Ticket]) -> StageTiming:
        """The device time that tickets have taken so far, and its price."""
        ticks = sum(ticket.ticks.total for ticket in tickets)
        usd = usd_of(cost_units(ticks, self.price_microusd))
        return StageTiming(ticks / TICKS_PER_SEC, usd)

    def pass_on(self, stage: Stage, job_id: str, serves: Serves | None = None) -> None:
        """Nothing was claimed for a message: others may get it if this worker must not."""
        left = self.placer is not None and serves is not None and self.placer.leaves(job_id)
        self.requeuer.requeue(job_id, serves, stage, left)

    # --- work messages ----------------------------------------------------------------------
    # A lost message costs time only: the sweeper enqueues the unit again.
    def enqueue_unit(self, job: JobRow, stage: Stage, index: int | None) -> None:
        model = {Stage.PROPOSE: job.proposer, Stage.VERIFY: job.verifier}.get(stage)
        self.enqueue(DueWork(job.job_id, stage, index, model, job.priority))

    def enqueue_publish(self, job_id: str) -> None:
        """If the job has become ready to be published."""
        job = self.store.get_job(job_id)
        if job.stage is Stage.PUBLISH:
            self.enqueue_unit(job, Stage.PUBLISH, None)

    def enqueue_again(self, lease: Lease, split_off: int | None = None) -> None:
        """A group that was given back, and the half that was split off from it.

        If the group has failed for good, the job may be ready to be published.
        """
        job = self.store.get_job(lease.job_id)
        for index in (lease.group_index, split_off):
            if index is not None:
                self.enqueue_unit(job, lease.stage, index)
        self.enqueue_publish(lease.job_id)
