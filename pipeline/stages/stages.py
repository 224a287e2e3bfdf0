"""The use cases: ingest → propose → verify → record → publish. Each claims, works, and commits.

A stage that finds its unit claimed by somebody else, or already past it, does nothing: bells may
ring twice. Whatever a stage raises is written to the store and the unit is given back; a second
claim runs it again to the same outputs. Only a lost device is raised on: this process must end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain

from specbatch.pipeline.engines.contract import Completion, Engines, ModelFolder, Submitted
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.inputs.contract import READER_BYTES
from specbatch.pipeline.inputs.rows import RowChecker
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.observe.tracing.context import Work, work_on
from specbatch.pipeline.observe.tracing.tracing import UNTRACED, Tracing
from specbatch.pipeline.policy.costs.controls import NOTHING_MEASURED
from specbatch.pipeline.policy.costs.pricing import cost_units, usd_of
from specbatch.pipeline.policy.journal import Lessons
from specbatch.pipeline.privacy.retention import kept_records
from specbatch.pipeline.privacy.tenants import NOBODY_PRIVATE, Privacy
from specbatch.pipeline.runtime.anchoring import Anchoring
from specbatch.pipeline.runtime.client import Ring
from specbatch.pipeline.runtime.codecs import Codecs, with_its_model
from specbatch.pipeline.runtime.leases import Held, LeaseKeeper
from specbatch.pipeline.runtime.outage import Outage
from specbatch.pipeline.runtime.passing import PassingOn
from specbatch.pipeline.runtime.purging import clear
from specbatch.pipeline.runtime.sharing import completed
from specbatch.pipeline.runtime.timekeeping import Timing, Untimed
from specbatch.pipeline.stages import telling
from specbatch.pipeline.stages.drafting import (
    READS_OF_DRAFTS,
    Drafting,
    check_drafts_here,
    uses_history,
)
from specbatch.pipeline.stages.guarding import Guarding
from specbatch.pipeline.stages.intake import Intake
from specbatch.pipeline.stages.keeping import finished_records, rows_left
from specbatch.pipeline.stages.known_jobs import KnownJobs
from specbatch.pipeline.stages.publishing import Publisher
from specbatch.pipeline.stages.recorded import put_kept
from specbatch.pipeline.stages.refill import Refills, refilled
from specbatch.pipeline.stages.requests import (
    ahead,
    blocks_of,
    goes_without_models,
    group_report,
    records_of,
    requests_of,
    with_text,
)
from specbatch.pipeline.stages.text_stop import Decode
from specbatch.pipeline.storage.artefacts import (
    DraftBlock,
    read_measured,
    read_results,
    write_drafts,
    write_results,
)
from specbatch.pipeline.storage.objects import Objects, probe
from specbatch.pipeline.storage.prompts import rows_of
from specbatch.pipeline.storage.workspace import name_of_attempt, put_own, read_own
from specbatch.schemas.errors import (
    ModelChangedError,
    ObjectError,
    RequestCancelledError,
    SpecbatchError,
    StoreError,
    UsageError,
)
from specbatch.schemas.numeric_class import UNKNOWN, Pinned, Serves
from specbatch.schemas.provenance import TICKS_PER_SEC
from specbatch.schemas.records import (
    Artefact,
    Bell,
    GroupWork,
    JobRow,
    Lease,
    PromptRow,
    Stage,
    StageTiming,
)
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.timekeeping import LEASES_OF_SILENCE, Attempt

log = logging.getLogger(__name__)

MOST_OPEN_GROUPS = 512


@dataclass(frozen=True, slots=True)
class Economy:
    """What this worker's device costs."""

    price_microusd: int  # of an hour, in millionths of a dollar


class Stages(Guarding):
    """What a worker of any kind can do; `proposing` and `verifying` are the engines it has."""

    def __init__(
        self,
        store: Store,
        objects: Objects,
        keeper: LeaseKeeper,
        ring: Ring,
        owner: str,
        lease_sec: float,
        economy: Economy,
        codec: Callable[[str], TextTokenizer],
        proposing: Engines | None = None,
        verifying: Engines | None = None,
        models: Callable[[str], ModelFolder] = inspect_model,
        tenant_depths: Mapping[str, int] | None = None,
        refills: Refills | None = None,
        max_open_groups: int = MOST_OPEN_GROUPS,
        max_attempts: int = READS_OF_DRAFTS,
        timing: Timing | None = None,
        privacy: Privacy = NOBODY_PRIVATE,
        tracing: Tracing = UNTRACED,
        reader_bytes: int = READER_BYTES,
        anchoring: Anchoring | None = None,
        only_job: str | None = None,
        outage: Outage | None = None,
    ) -> None:
        """`max_open_groups`: of a job, before its input is read on. `timing` is told what engines
        are used for, `tracing` how it went. `anchoring`: what anchors logs of published jobs.
        `only_job`: work of no other job is taken."""
        super().__init__(store, ring, keeper, privacy, tracing, outage)
        self._jobs = KnownJobs(store)
        self._passing = PassingOn(store, ring, LEASES_OF_SILENCE * lease_sec)
        self._objects = objects
        self._only_job = only_job
        self._owner = owner
        self._lease_sec = lease_sec
        self._economy = economy
        self._codecs = Codecs(codec, models)
        self._proposing = proposing
        self._verifying = verifying
        self._models = models
        self._tenant_depths = tenant_depths or {}
        beside = verifying is not None and verifying.proposer is not None
        self._drafting = Drafting(store, objects, beside, max_attempts)
        self._refills = refills
        self._timing = timing or Untimed()
        self._anchoring = anchoring
        self._publisher = Publisher(
            store, objects, self._decode, self._checker, max_attempts, reader_bytes
        )
        reading = (max_open_groups, privacy, reader_bytes)
        self._intake = Intake(store, objects, ring, self._drafting, self._codecs, models, *reading)

    def run(self, stage: Stage, job_id: str, group_index: int | None) -> None:
        """Do what a message asks for, if it is still to be done and can be written."""
        if not self._outage.wait() or (group_index is None and self._outage.holds_back(job_id)):
            return  # the sweeper enqueues it again
        try:
            self._run(stage, job_id, group_index)
        except (StoreError, ObjectError) as error:
            if not error.refused:
                raise
            self._outage.begin(error)
        else:
            self._outage.over()

    def _run(self, stage: Stage, job_id: str, group_index: int | None) -> None:
        work_on(Work(job_id, str(stage), group_index))  # another unit, where that is claimed
        match stage:
            case Stage.INGEST:
                self.ingest(job_id)
            case Stage.PUBLISH:
                self.publish(job_id)
            case Stage.PROPOSE if group_index is not None:
                self.propose(job_id, group_index)
            case Stage.VERIFY if group_index is not None:
                self.verify(job_id, group_index)
            case Stage.RECORD if group_index is not None:
                self.record(job_id, group_index)
            case _:
                log.warning("nothing to do at stage %s of job %s", stage, job_id)

    # --- ingest ----------------------------------------------------------------------------
    def ingest(self, job_id: str) -> None:
        """Read and check the input; write groups; ring for each as soon as it is stored.

        It pauses, and is rung for again, where more groups are open than need be.
        """
        work = self._store.claim_job(job_id, Stage.INGEST, self._owner, self._lease_sec)
        if work is None:
            return
        with self._guarded(work.lease) as held:
            job, spec = self._jobs.fresh(job_id)
            self._begin(held, job)
            self._intake.read(work, held, job, spec)
        self._ring_job(job_id)

    # --- propose ---------------------------------------------------------------------------
    def propose(self, job_id: str, index: int) -> None:
        """Let the draft model write ahead, one block per sample, with the request's own noise."""
        host = self._engines(self._proposing, "propose")
        work = self._claim_next(Stage.PROPOSE, host.verifier.ref, job_id, index)
        if work is None:
            return
        with self._engaged(work.lease, host) as (held, begun):
            job, spec = self._jobs.of_group(work.lease.job_id)
            self._begin(held, job, work)
            rows = rows_of(self._objects, job, work.where)
            completions: list[Completion] = []
            artefact: Artefact | None = None
            if length := self._drafting.length(job, spec):
                begun.append(self._write_ahead(host, job, spec, rows, length))
                completions = begun[0].wait()
                blocks = blocks_of(completions, self._economy.price_microusd)
                artefact = self._put(job, "drafts", work.lease, write_drafts(blocks))
            held.check()
            telling.drafted(held.span, job, begun, completions)
            timing = self._spent(begun)
            self._drafting.drafted(
                job, sum(len(c.token_ids) for c in completions), timing.device_usd
            )
            keep = partial(self._store.advance, work.lease, Stage.VERIFY, artefact, timing)
            self._timing.keeping(work.lease, keep)
            self._ring_for(work.lease, Stage.VERIFY, job)

    def _write_ahead(
        self, host: Engines, job: JobRow, spec: JobSpec, rows: Sequence[PromptRow], length: int
    ) -> Submitted:
        decode = self._decode(job)
        cap = self._tenant_depths.get(job.tenant)
        keeper = self._privacy.keeper(job)
        requests = [
            ahead(request, length)
            for row in rows
            if not goes_without_models(spec, row)
            for request in requests_of(job.job_id, spec, row, decode, tenant_cap=cap, kept=keeper)
            if request.max_depth != 0  # nobody would verify it
        ]
        return host.service(spec.engine.of_proposer()).submit(job.job_id, requests)

    # --- verify ----------------------------------------------------------------------------
    def verify(self, job_id: str, index: int) -> None:
        """Join the fused batch with this group's prompts and wait until all are complete."""
        host = self._engines(self._verifying, "verify")
        serves = host.serves()
        work = self._claim_next(Stage.VERIFY, host.verifier.ref, job_id, index, serves)
        if work is None:
            self._passing.pass_on(job_id, serves)
            return
        with self._engaged(work.lease, host) as (held, begun):
            job, spec = self._to_verify(host, work)
            self._begin(held, job, work)
            check_drafts_here(host.proposer is not None, spec)
            rows = rows_left(self._store, self._objects, job, work)
            drafts = self._drafting.blocks(job, work)
            try:
                whole = not work.rows_kept  # else its rows are not counted as the store does
                lessons = self._complete(host, job, spec, held, rows, drafts, begun, whole)
            except RequestCancelledError:
                if not held.cancelled.is_set():
                    raise  # the worker ends, the job does not
                decided = self._decided(host, job, work)
                self._keep_finished(work.lease, decided, spec, rows, drafts, begun)
                return
            completions = [done for ticket in begun for done in ticket.wait()]
            job = self._decided(host, job, work)
            records = records_of(job, rows, completions, drafts, self._economy.price_microusd)
            measured = sum((lesson.measured for lesson in lessons), NOTHING_MEASURED)
            beside = measured.priced(self._economy.price_microusd).report()
            artefact = self._put(job, "results", work.lease, write_results(records, beside))
            held.check()
            telling.verified(held.span, job, begun, records)
            for lesson in lessons:  # first: a job that is done has told all it taught
                self._drafting.learn(job, lesson)
            keep = partial(
                self._store.advance, work.lease, Stage.RECORD, artefact, self._spent(begun)
            )
            self._timing.keeping(work.lease, keep)
            self._ring_for(work.lease, Stage.RECORD, job)
        if work.suspect:
            self._ring_suspects(work.lease.job_id)

    def _to_verify(self, host: Engines, work: GroupWork) -> tuple[JobRow, JobSpec]:
        """The job with the class in which this worker verifies it, and its spec in that dtype."""
        job, spec = self._jobs.of_group(work.lease.job_id)
        engine = spec.engine.resolved(work.numeric_class)
        here, pinned = host.serves().class_of(engine.key), work.numeric_class
        if pinned not in (None, UNKNOWN, here):
            raise UsageError(
                f"the job asks for {engine.key}, which is {here} here and not {pinned}"
            )
        return replace(job, numeric_class=here), spec.model_copy(update={"engine": engine})

    def _decided(self, host: Engines, job: JobRow, work: GroupWork) -> JobRow:
        """The job with the fingerprint of the model that has decided a group's tokens.

        It was loaded after the group was claimed, perhaps. Raises `ModelChangedError` where its
        files were replaced between the two.
        """
        serves = host.serves()
        if not serves.takes(Pinned.of(work)):
            raise ModelChangedError(
                f"model `{host.verifier.ref}` was replaced while it was loaded for job {job.job_id}"
            )
        found = serves.fingerprint
        return replace(job, model_fingerprint=None if found is None else found.digest)

    def _claim_next(
        self, stage: Stage, model: str, job_id: str, index: int, serves: Serves | None = None
    ) -> GroupWork | None:
        """The group whose turn it is. Where there is none, the bell's own: its job may name the
        model otherwise, or it is to be closed."""
        who = (self._owner, self._lease_sec)
        if self._only_job is not None and serves is None:  # else `serves` names the one job
            return self._store.claim_group(job_id, index, stage, *who)
        work = self._store.claim_next(stage, model, *who, serves)
        return work or self._store.claim_group(job_id, index, stage, *who, serves)

    def _keep_finished(
        self,
        lease: Lease,
        job: JobRow,
        spec: JobSpec,
        rows: Sequence[PromptRow],
        drafts: Mapping[tuple[int, int], DraftBlock],
        begun: Sequence[Submitted],
    ) -> None:
        """End a group of a job that was stopped; its finished rows are kept."""
        price = self._economy.price_microusd
        codec = self._codecs.of_job(self._jobs.of_group(job.job_id)[0])
        records = finished_records(job, spec, rows, drafts, begun, codec, price)
        report = group_report(records) | put_kept(self._objects, job, lease, records)
        kept, timing = kept_records(self._privacy.keeper(job), records, codec), self._spent(begun)
        self._timing.keeping(lease, partial(self._store.keep_part, lease, kept, timing, report))
        self._ring_job(lease.job_id)

    def _complete(
        self,
        host: Engines,
        job: JobRow,
        spec: JobSpec,
        held: Held,
        rows: Sequence[PromptRow],
        drafts: Mapping[tuple[int, int], DraftBlock],
        begun: list[Submitted],
        may_cut: bool,
    ) -> list[Lessons]:
        """Have the engine complete a group's rows, in the tickets `begun`; what that taught.

        Rows that go to somebody idle meanwhile are not among them, nor the group's any more.
        """
        decode = self._decode(job)
        history = self._drafting.history(job) if uses_history(spec) else None
        cap = self._tenant_depths.get(job.tenant)
        pins = host.pins(spec.speculation)
        keeper = self._privacy.keeper(job)
        by_row = [
            requests_of(job.job_id, spec, row, decode, drafts, history, cap, pins, keeper)
            for row in rows
        ]
        requests = list(chain.from_iterable(by_row))
        priors = self._drafting.priors(job) if spec.speculation.enabled else ()

        def cut(keep: int) -> None:
            index = self._store.cut_group(held.lease, keep)
            telling.cut(held.span, index, keep)
            self._ring(Bell(job.job_id, Stage.VERIFY, index, job.verifier, job.priority))

        with refilled(self._refills, job, spec, held.lease.group_index or 0, requests):
            service = host.service(spec.engine)
            begun.append(service.submit(job.job_id, requests, priors))
            held.spent_usd = lambda: self._spent(begun).device_usd
            if held.cancelled.is_set():  # before the engine knew of them
                host.cancel(job.job_id)
            return completed(service, begun, held, by_row, cut, may_cut)

    # --- record ----------------------------------------------------------------------------
    def record(self, job_id: str, index: int) -> None:
        """Decode the text and commit the group in one transaction."""
        work = self._store.claim_group(job_id, index, Stage.RECORD, self._owner, self._lease_sec)
        if work is None:
            return
        begun, begun_ns = time.monotonic(), time.time_ns()
        with self._guarded(work.lease) as held:
            assert work.results is not None, "a group reaches RECORD with its results"
            job, spec = self._jobs.of_group(job_id)
            telling.begun(held.span, Stage.RECORD, job, work)
            rows = rows_of(self._objects, job, work.where)
            mine = {row.row_index for row in rows}  # others cut off from it share the file
            results = read_own(self._objects, job, work.results)
            records = [record for record in read_results(results) if record.row_index in mine]
            codec = self._codecs.of_job(job)
            texts = codec.decode_batch([r.token_ids for r in records])
            done = with_text(records, texts, rows, spec, codec.decode)
            due = self._store.commit_group(
                work.lease,
                kept_records(self._privacy.keeper(job), done, codec, texts),
                StageTiming(0.0, time.monotonic() - begun),
                group_report(records) | read_measured(results),
            )
            telling.recorded(held.span, job, records, begun_ns)
            if due is not None:  # it waited for this group only
                self._ring(Bell(job_id, due, None, priority=job.priority))

    # --- publish ---------------------------------------------------------------------------
    def publish(self, job_id: str) -> None:
        """Write the output files, the manifest last, and end the job.

        Beside the output of a job that was stopped lies what is left of it.
        """
        work = self._store.claim_job(job_id, Stage.PUBLISH, self._owner, self._lease_sec)
        if work is None:
            return
        published = False
        with self._guarded(work.lease) as held:
            job, spec = self._jobs.fresh(job_id)
            telling.begun(held.span, Stage.PUBLISH, job)
            confirm = partial(self._keeper.confirm, held)
            with with_its_model(job):  # the rest of a stopped job is checked with it
                state, error, manifest = self._publisher.publish(work, job, spec, confirm)
            words = error and self._privacy.words(job, error)
            self._store.finish_job(work.lease, state, words, manifest)
            published = True
            self._outage.published(job_id)
            self._drafting.forget(job)
            if not job.privacy.is_full:
                clear(self._store, self._objects, job.job_id)
        if published and self._anchoring is not None:
            self._anchoring.published(job_id)

    # --- shared ----------------------------------------------------------------------------
    def _decode(self, job: JobRow) -> Decode:
        """The job's detokenizer, loaded when it is first called."""
        codec = cache(lambda: self._codecs.of_job(job))
        return lambda ids: codec().decode(ids)

    def _checker(self, spec: JobSpec) -> RowChecker:
        """What a job's rows are checked with."""
        verifier = self._models(spec.verifier)
        codec = self._codecs.of_folder(verifier)
        return RowChecker(spec, codec, verifier.context_tokens, verifier.vocab_size)

    def _put(self, job: JobRow, kind: str, lease: Lease, data: bytes) -> Artefact:
        return put_own(self._objects, job, name_of_attempt(kind, lease), data)

    def _probes(self, error: SpecbatchError) -> dict[Hashable, Callable[[], object]]:
        if not isinstance(error, ObjectError) or not error.place:
            return {}
        folder = error.place.rpartition("/")[0]
        return {folder: partial(probe, self._objects, folder)}

    @contextmanager
    def _engaged(self, lease: Lease, host: Engines) -> Iterator[tuple[Held, list[Submitted]]]:
        """Work under a lease on the device; what it takes is told by the tickets in the list."""
        with self._timing.working(Attempt.of(lease)) as begun, self._guarded(lease, host) as held:
            yield held, begun

    def _spent(self, begun: Sequence[Submitted]) -> StageTiming:
        """What tickets have taken so far."""
        ticks = sum(ticket.ticks.total for ticket in begun)
        usd = usd_of(cost_units(ticks, self._economy.price_microusd))
        return StageTiming(0.0, ticks / TICKS_PER_SEC, usd)
