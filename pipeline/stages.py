"""The use cases: ingest → propose → verify → record → publish. Each claims, works, and commits.

A stage that finds its unit claimed by somebody else, or already past it, does nothing: bells may
ring twice. Whatever a stage raises is written to the store and the unit is given back; a second
claim runs it again to the same outputs. Only a lost device is raised on: this process must end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from specbatch.pipeline.client import Ring
from specbatch.pipeline.engine.host import EngineHost
from specbatch.pipeline.engine.model_folder import ModelFolder, check_pair, inspect_model
from specbatch.pipeline.engine.quantised import fingerprint_of
from specbatch.pipeline.engine.sequence import Completion
from specbatch.pipeline.ingest.artefacts import (
    DraftBlock,
    read_drafts,
    read_prompts,
    read_results,
    write_drafts,
    write_prompts,
    write_results,
)
from specbatch.pipeline.ingest.codec import TextCodec
from specbatch.pipeline.ingest.objects import Objects, join
from specbatch.pipeline.ingest.outputs import OutputWriter
from specbatch.pipeline.ingest.planner import PlannedGroup, plan
from specbatch.pipeline.ingest.rows import RowChecker
from specbatch.pipeline.ingest.sources import open_source
from specbatch.pipeline.leases import Held, LeaseKeeper
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.policy.pricing import device_usd
from specbatch.pipeline.publishing import final_state, with_unfinished_rows
from specbatch.pipeline.requests import ahead, records_of, requests_of, row_and_sample, with_text
from specbatch.pipeline.text_stop import Decode
from specbatch.schemas.errors import (
    DeviceLostError,
    FencedError,
    RequestCancelledError,
    SpecbatchError,
    UsageError,
)
from specbatch.schemas.records import (
    Artefact,
    Bell,
    JobRow,
    Lease,
    NewGroup,
    Stage,
    StageTiming,
    Verification,
)
from specbatch.schemas.spec import JobSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Economy:
    """What this worker's device costs."""

    usd_per_hour: float


class Stages:
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
        codec: Callable[[str], TextCodec],
        proposing: EngineHost | None = None,
        verifying: EngineHost | None = None,
        models: Callable[[str], ModelFolder] = inspect_model,
    ) -> None:
        self._store = store
        self._objects = objects
        self._keeper = keeper
        self._ring = ring
        self._owner = owner
        self._lease_sec = lease_sec
        self._economy = economy
        self._codec = codec
        self._proposing = proposing
        self._verifying = verifying
        self._models = models

    def run(self, stage: Stage, job_id: str, group_index: int | None) -> None:
        """Do what a bell asks for, if it is still to be done."""
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
        """Read and check the input; write groups; ring for each as soon as it is stored."""
        work = self._store.claim_job(job_id, Stage.INGEST, self._owner, self._lease_sec)
        if work is None:
            return
        with self._guarded(work.lease) as held:
            job, spec = self._job(job_id)
            verifier, proposer = self._check_models(spec)
            OutputWriter(self._objects, spec.output.uri, job_id).claim()
            source = open_source(spec.input, self._objects)
            source.check()
            codec = self._codec(str(verifier.path))
            checker = RowChecker(spec, codec, verifier.context_tokens, verifier.vocab_size)
            rows = work.next_row
            for planned in plan(
                source, checker, spec.group_size, work.cursor, work.next_row, work.next_group
            ):
                held.check()
                if held.cancelled.is_set():
                    break
                self._store_group(work.lease, job, spec, planned)
                rows = planned.next_row
            engine = spec.engine
            identity = {
                "input_format": source.format,
                "verifier_sha256": fingerprint_of(verifier.fingerprint, engine.verifier_weights),
                "verifier_weights": engine.verifier_weights,
            }
            if proposer is not None:
                identity["proposer_sha256"] = fingerprint_of(
                    proposer.fingerprint, engine.proposer_weights
                )
            self._store.finish_ingest(work.lease, rows, identity)
        self._ring_job(job_id)

    def _check_models(self, spec: JobSpec) -> tuple[ModelFolder, ModelFolder | None]:
        verifier = self._models(spec.verifier)
        proposer = self._models(spec.proposer) if spec.proposer else None
        if proposer is not None:
            check_pair(verifier, proposer)
        return verifier, proposer

    def _store_group(self, lease: Lease, job: JobRow, spec: JobSpec, planned: PlannedGroup) -> None:
        first = Stage.PROPOSE if spec.proposes(planned.index) else Stage.VERIFY
        groups = []
        if planned.rows:
            name = f"prompts-{planned.index:08d}.arrow"
            artefact = self._objects.put_bytes(
                join(job.workspace_uri, name), write_prompts(planned.rows)
            )
            groups.append(
                NewGroup(
                    index=planned.index,
                    source=planned.source,
                    rows=len(planned.rows),
                    prompt_tokens=planned.prompt_tokens,
                    prompts=artefact,
                    first_stage=first,
                )
            )
        self._store.add_groups(lease, groups, planned.rejected, planned.next_row, planned.cursor)
        for group in groups:
            self._ring(Bell(job.job_id, first, group.index, self._model_of(job, first)))

    # --- propose ---------------------------------------------------------------------------
    def propose(self, job_id: str, index: int) -> None:
        """Let the draft model write ahead, one block per sample, with the request's own noise."""
        host = self._engines(self._proposing, "propose")
        work = self._store.claim_group(job_id, index, Stage.PROPOSE, self._owner, self._lease_sec)
        if work is None:
            return
        with self._guarded(work.lease, host) as held:
            job, spec = self._job(job_id)
            rows = read_prompts(self._objects.get_bytes(work.prompts.uri, work.prompts))
            decode, length = self._decode(spec), spec.speculation.pregenerate_tokens
            requests = [
                ahead(r, length) for row in rows for r in requests_of(job_id, spec, row, decode)
            ]
            completions = host.service(spec.engine.of_proposer()).submit(job_id, requests).wait()
            blocks = [
                DraftBlock(*row_and_sample(c.request_id), c.token_ids, c.compute_sec)
                for c in completions
                if c.error is None
            ]
            artefact = self._put(job, "drafts", work.lease, write_drafts(blocks))
            held.check()
            timing = self._timing(completions)
            self._store.advance(work.lease, Stage.VERIFY, artefact, timing)
            self._ring(Bell(job_id, Stage.VERIFY, index, job.verifier))

    # --- verify ----------------------------------------------------------------------------
    def verify(self, job_id: str, index: int) -> None:
        """Join the fused batch with this group's prompts and wait until all are complete."""
        host = self._engines(self._verifying, "verify")
        work = self._store.claim_group(job_id, index, Stage.VERIFY, self._owner, self._lease_sec)
        if work is None:
            return
        with self._guarded(work.lease, host) as held:
            job, spec = self._job(job_id)
            _check_drafts_here(host, spec)
            rows = read_prompts(self._objects.get_bytes(work.prompts.uri, work.prompts))
            drafts: dict[tuple[int, int], DraftBlock] = {}
            if work.drafts is not None:
                blocks = read_drafts(self._objects.get_bytes(work.drafts.uri, work.drafts))
                drafts = {(b.row_index, b.sample_index): b for b in blocks}
            decode = self._decode(spec)
            requests = [r for row in rows for r in requests_of(job_id, spec, row, decode, drafts)]
            completions = host.service(spec.engine).submit(job_id, requests).wait()
            records = records_of(job, rows, completions, drafts, self._economy.usd_per_hour)
            artefact = self._put(job, "results", work.lease, write_results(records))
            held.check()
            timing = self._timing(completions)
            self._store.advance(work.lease, Stage.RECORD, artefact, timing)
            self._ring(Bell(job_id, Stage.RECORD, index))

    # --- record ----------------------------------------------------------------------------
    def record(self, job_id: str, index: int) -> None:
        """Decode the text and commit the group in one transaction."""
        work = self._store.claim_group(job_id, index, Stage.RECORD, self._owner, self._lease_sec)
        if work is None:
            return
        begun = time.monotonic()
        with self._guarded(work.lease):
            assert work.results is not None, "a group reaches RECORD with its results"
            _, spec = self._job(job_id)
            records = read_results(self._objects.get_bytes(work.results.uri, work.results))
            rows = read_prompts(self._objects.get_bytes(work.prompts.uri, work.prompts))
            codec = self._codec(str(self._models(spec.verifier).path))
            texts = codec.decode_batch([r.token_ids for r in records])
            report = {
                "compute_sec": sum(r.compute_sec for r in records),
                "draft_sec": sum(r.draft_sec for r in records),
                "decode_sec": sum(r.decode_sec for r in records),
                "baseline_sec": sum(r.baseline_sec for r in records),
            }
            if any(r.recheck.tokens for r in records):
                report |= {
                    "rechecked_tokens": sum(r.recheck.tokens for r in records),
                    "differing_tokens": sum(r.recheck.differing for r in records),
                    "largest_margin": max(r.recheck.largest_margin for r in records),
                }
            self._store.commit_group(
                work.lease,
                with_text(records, texts, rows, spec, codec.decode),
                StageTiming(0.0, time.monotonic() - begun),
                report,
            )
        self._ring_job(job_id)

    # --- publish ---------------------------------------------------------------------------
    def publish(self, job_id: str) -> None:
        """Write the output files, the manifest last, and end the job."""
        work = self._store.claim_job(job_id, Stage.PUBLISH, self._owner, self._lease_sec)
        if work is None:
            return
        with self._guarded(work.lease):
            job, spec = self._job(job_id)
            rows = with_unfinished_rows(self._store, self._objects, job)
            OutputWriter(self._objects, spec.output.uri, job_id).write(
                rows,
                self._store.rejected(job_id),
                openai=job.report.get("input_format") == "openai",
                created=int(job.created_at),
                decode=self._decode(spec),
                info={
                    "name": job.name,
                    "spec_sha256": job.spec_digest,
                    "verification": spec.speculation.verification.value,
                },
            )
            state, error = final_state(job, self._store.progress(job_id))
            self._store.finish_job(work.lease, state, error)

    # --- shared ----------------------------------------------------------------------------
    @contextmanager
    def _guarded(self, lease: Lease, host: EngineHost | None = None) -> Iterator[Held]:
        """Keep the lease alive; on failure give the unit back with the reason."""
        on_cancel = (lambda: host.cancel(lease.job_id)) if host else (lambda: None)
        try:
            with self._keeper.hold(lease, on_cancel) as held:
                yield held
        except FencedError as error:
            log.info("dropped: %s", error)
        except RequestCancelledError:
            if held.cancelled.is_set():
                self._store.cancel_group(lease)
                self._ring_job(lease.job_id)
            else:
                self._store.release(lease, "the worker was stopped", forgiven=True)
        except UsageError as error:
            # The job itself is wrong; no retry will help.
            if lease.group_index is None:
                self._store.fail_job(lease, str(error))
            else:
                self._store.release(lease, str(error))
                self._ring_again(lease)
        except DeviceLostError as error:
            self._store.release(lease, str(error), forgiven=error.blameless)
            self._ring_again(lease)
            raise
        except SpecbatchError as error:
            log.warning("job %s group %s: %s", lease.job_id, lease.group_index, error)
            self._store.release(lease, str(error))
            self._ring_again(lease)
        except Exception as error:
            self._store.release(lease, f"{type(error).__name__}: {error}")
            self._ring_again(lease)
            raise

    def _job(self, job_id: str) -> tuple[JobRow, JobSpec]:
        job = self._store.get_job(job_id)
        return job, JobSpec.model_validate(job.spec)

    def _decode(self, spec: JobSpec) -> Decode:
        """The verifier's detokenizer, loaded when it is first called."""
        codec = cache(lambda: self._codec(str(self._models(spec.verifier).path)))
        return lambda ids: codec().decode(ids)

    def _put(self, job: JobRow, kind: str, lease: Lease, data: bytes) -> Artefact:
        name = f"{kind}-{lease.group_index:08d}-{lease.generation}.arrow"
        return self._objects.put_bytes(join(job.workspace_uri, name), data)

    def _timing(self, completions: list[Completion]) -> StageTiming:
        compute = sum(c.compute_sec for c in completions)
        return StageTiming(0.0, compute, device_usd(compute, self._economy.usd_per_hour))

    def _ring_again(self, lease: Lease) -> None:
        """For the unit that was given back; if that failed it for good, perhaps for publishing."""
        if lease.group_index is not None:
            job = self._store.get_job(lease.job_id)
            model = self._model_of(job, lease.stage)
            self._ring(Bell(lease.job_id, lease.stage, lease.group_index, model))
        self._ring_job(lease.job_id)

    def _ring_job(self, job_id: str) -> None:
        """Ring for publishing when this was the last thing it waited for."""
        if self._store.get_job(job_id).stage is Stage.PUBLISH:
            self._ring(Bell(job_id, Stage.PUBLISH, None))

    @staticmethod
    def _model_of(job: JobRow, stage: Stage) -> str | None:
        return job.proposer if stage is Stage.PROPOSE else job.verifier

    @staticmethod
    def _engines(host: EngineHost | None, kind: str) -> EngineHost:
        if host is None:
            raise UsageError(
                f"this worker has no engine to {kind} with: start `specbatch worker {kind}`"
            )
        host.check()  # nothing is claimed once the device is gone
        return host


def _check_drafts_here(host: EngineHost, spec: JobSpec) -> None:
    """A ratio test without drafts would sample as the spec says, and never as it is meant."""
    verification = spec.speculation.verification
    if verification is not Verification.COUPLED and host.proposer is None:
        raise UsageError(
            f"verification {verification} needs the draft model beside the verifier: start "
            f"`specbatch worker verify --verifier {spec.verifier} --proposer {spec.proposer}`"
        )
