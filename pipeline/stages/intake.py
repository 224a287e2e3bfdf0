"""Reading a job's input into groups, no faster than they are done.

When too many of a job's groups are open the lease is given back, and nobody sleeps or waits: the
store says when reading is due again, and the bell rings. A reading that pauses stays in memory,
with its ids and its place in the file, so that going on costs nothing; another worker goes on from
the store's cursor, and reads the ids before it once more.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.models.identity import check_models, identity_of, models_of
from specbatch.pipeline.engines.models.model_folder import vocabulary_digest
from specbatch.pipeline.inputs.contract import READER_BYTES, Source
from specbatch.pipeline.inputs.planner import (
    MOST_TOGETHER,
    WRITERS,
    PlannedGroup,
    in_batches,
    plan,
    write_groups,
)
from specbatch.pipeline.inputs.rows import RowChecker
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.outputs.outputs import OutputWriter
from specbatch.pipeline.privacy.tenants import NOBODY_PRIVATE, Privacy
from specbatch.pipeline.runtime.client import Ring
from specbatch.pipeline.runtime.codecs import Codecs, with_its_model
from specbatch.pipeline.runtime.leases import Held
from specbatch.pipeline.stages import telling
from specbatch.pipeline.stages.drafting import Drafting
from specbatch.pipeline.stages.recorded import put_rejected
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.records import Bell, JobRow, JobWork, Lease, SourcePosition, Stage
from specbatch.schemas.spec import JobSpec

MOST_PAUSED = 8  # readings kept in memory; of further ones the oldest is forgotten
MOST_WITH_PROCESS = 2  # of them keep the process that decodes; the others start one to resume

Place = tuple[SourcePosition | None, int, int]  # cursor, next row, next group


@dataclass(slots=True)
class _Reading:
    """An input that is being read, and what the report keeps of it."""

    source: Source
    batches: Iterator[list[PlannedGroup]]
    identity: dict[str, str]


class Intake:
    """Reads inputs into groups. Thread-safe."""

    def __init__(
        self,
        store: Store,
        objects: Objects,
        ring: Ring,
        drafting: Drafting,
        codecs: Codecs,
        models: Callable[[str], ModelFolder],
        max_open_groups: int,
        privacy: Privacy = NOBODY_PRIVATE,
        reader_bytes: int = READER_BYTES,
    ) -> None:
        self._reader_bytes = reader_bytes
        self._privacy = privacy
        self._store = store
        self._objects = objects
        self._ring = ring
        self._drafting = drafting
        self._codecs = codecs
        self._models = models
        self._max_open = max_open_groups
        self._paused: OrderedDict[str, tuple[Place, _Reading]] = OrderedDict()  # the newest is last
        self._lock = threading.Lock()

    def read(self, work: JobWork, held: Held, job: JobRow, spec: JobSpec) -> None:
        """Read on until the input ends, the job is stopped, or enough groups are open.

        In the last case the lease is given back; when the job is stopped too, at the last group
        that is stored, so that what is left can be told. Raises `UsageError`, `FencedError`,
        `ModelChangedError` where the job was begun with other models, and `ObjectError` where a
        store is out of reach.
        """
        place = (work.cursor, work.next_row, work.next_group)
        reading = self._going_on(job.job_id, place)
        if reading is None:
            with with_its_model(job):
                reading = self._begin(work, job, spec)
            # At once: a job may be stopped while its reading pauses, and is published all the same.
            self._store.note_report(work.lease, reading.identity)
        rows, room = work.next_row, 1
        with ThreadPoolExecutor(WRITERS, "prompts") as writers:
            for batch in reading.batches:
                held.check()
                if held.cancelled.is_set():
                    self._store.release(work.lease, "its job was stopped", forgiven=True)
                    return
                begun_ns = time.time_ns()
                self._store_groups(work.lease, job, spec, batch, rows, writers)
                telling.read(held.span, job, batch, begun_ns)
                last = batch[-1]
                rows, room = last.next_row, room - sum(bool(planned.rows) for planned in batch)
                if room <= 0 and not (room := self._store.pause_ingest(work.lease, self._max_open)):
                    place = (last.cursor, rows, last.index + bool(last.rows))
                    self._keep(job.job_id, place, reading)
                    return
        self._store.finish_ingest(work.lease, rows, reading.identity, rows)

    def _begin(self, work: JobWork, job: JobRow, spec: JobSpec) -> _Reading:
        self._privacy.check(job)
        verifier, proposer = check_models(self._models, spec)
        self._store.pin_models(work.lease, models_of(spec, verifier, proposer))
        OutputWriter(self._objects, spec.output.uri, job.job_id).claim()
        source = open_source(spec.input, self._objects, self._reader_bytes)
        source.check()
        self._drafting.prepare(work.lease, job, spec, vocabulary_digest(verifier))
        codec = self._codecs.of_folder(verifier)
        checker = RowChecker(spec, codec, verifier.context_tokens, verifier.vocab_size)
        start = (work.cursor, work.next_row, work.next_group)
        planned = plan(source, checker, spec.group_size, *start)
        identity = identity_of(job, spec, source.format, verifier, proposer)
        batches = in_batches(planned, min(MOST_TOGETHER, self._max_open))
        return _Reading(source, batches, identity)

    def _store_groups(
        self,
        lease: Lease,
        job: JobRow,
        spec: JobSpec,
        batch: Sequence[PlannedGroup],
        from_row: int,
        writers: Executor,
    ) -> None:
        def first_stage(index: int) -> Stage:
            return Stage.PROPOSE if self._drafting.proposes(job, spec, index) else Stage.VERIFY

        groups = write_groups(self._objects, job, batch, first_stage, writers)
        keeper = self._privacy.keeper(job)
        if not keeper.is_full:
            for planned in batch:
                put_rejected(self._objects, job, planned.rejected)
        rejected = [keeper.rejected(row) for planned in batch for row in planned.rejected]
        last = batch[-1]
        self._store.add_groups(lease, groups, rejected, last.next_row, last.cursor, from_row)
        for group in groups:
            first = group.first_stage
            model = job.proposer if first is Stage.PROPOSE else job.verifier
            self._ring(Bell(job.job_id, first, group.index, model, job.priority))

    # --- readings that pause --------------------------------------------------------------------
    def _keep(self, job_id: str, place: Place, reading: _Reading) -> None:
        with self._lock:
            self._paused[job_id] = (place, reading)
            self._paused.move_to_end(job_id)
            while len(self._paused) > MOST_PAUSED:
                self._paused.popitem(last=False)
            for _, paused in list(self._paused.values())[:-MOST_WITH_PROCESS]:
                paused.source.pause()

    def _going_on(self, job_id: str, place: Place) -> _Reading | None:
        """The reading that paused just there. Elsewhere it is stale: another worker went on."""
        with self._lock:
            paused = self._paused.pop(job_id, None)
        return paused[1] if paused is not None and paused[0] == place else None
