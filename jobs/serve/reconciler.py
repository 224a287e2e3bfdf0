"""Takes batches from one status to the next, in a thread of the service.

    new      → its file is checked                             (or it has failed)
    running  → its job is submitted, then followed to its end: its files are made, it ends

Each step may be cut off at any point and is done again from its beginning: a job is submitted under
the batch's id as its idempotency key, and a batch ends together with its files' rows. The
model never runs here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbatch.jobs.serve.checking import check_file
from specbatch.jobs.serve.collecting import collect
from specbatch.jobs.serve.errors import failure, without_places
from specbatch.jobs.serve.file_store import FileStore
from specbatch.jobs.serve.models import ServedModel
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.privacy.tenants import NOBODY_PRIVATE, Privacy
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.errors import OverBudgetError, SpecbatchError, UsageError
from specbatch.schemas.records import JobRow
from specbatch.schemas.serving import BatchEnd, BatchPhase, BatchRow, BatchStatus

log = logging.getLogger(__name__)

EVERY_SEC = 0.5
CANCELLED = "cancelled by its client"


@dataclass(slots=True)
class Reconciler:
    """The steps of all open batches."""

    store: Store
    client: Client
    file_store: FileStore
    models: dict[str, ServedModel]
    most_requests: int
    privacy: Privacy = NOBODY_PRIVATE
    _awake: threading.Event = field(default_factory=threading.Event)
    _said: dict[str, str] = field(default_factory=dict)  # by batch: why it waits
    _closing: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something to do now."""
        self._awake.set()

    def close(self) -> None:
        self._closing = True
        self._awake.set()
        if self._thread is not None:
            self._thread.join()

    def step_all(self) -> None:
        """One step of each of this service's open batches, oldest first. What one raises does not
        keep the others."""
        open_ones = self.store.open_batches(self.file_store.service_id)
        jobs = self.store.jobs_of_ids([b.job_id for b in open_ones if b.job_id is not None])
        waiting = {}
        for batch in open_ones:
            if self._closing:
                return
            try:
                self.step(batch, jobs.get(batch.job_id or ""))
            except Exception as error:  # the next round tries it again
                waiting[batch.batch_id] = said = repr(error)
                if self._said.get(batch.batch_id) != said:
                    is_ours = isinstance(error, SpecbatchError | OSError)
                    log.warning("batch %s waits: %s", batch.batch_id, error, exc_info=not is_ours)
        self._said = waiting

    def step(self, batch: BatchRow, job: JobRow | None = None) -> None:
        """`job`: the batch's, as it was read; None: it is read here.

        Raises `SpecbatchError` and `OSError`; the next round then begins where this one did.
        """
        if batch.phase is BatchPhase.NEW:
            batch = self._checked(batch)
        if batch.phase is BatchPhase.RUNNING and batch.job_id is None:
            batch = self._submitted(batch)
        if batch.phase is BatchPhase.ENDED or batch.job_id is None:
            return
        job = job or self.store.get_job(batch.job_id)
        if job.state.is_final:
            self._ended(batch, collect(self.file_store, batch, job))
        elif (
            batch.cancelling_at is not None and not self.store.get_job(job.job_id).cancel_requested
        ):
            self.client.cancel(job.job_id, CANCELLED)

    def _checked(self, batch: BatchRow) -> BatchRow:
        path = self.file_store.path_of(batch.input_file_id)
        file = self.store.file(batch.tenant, batch.input_file_id)
        limits = self.models, self.most_requests, lambda: self._must_stop(batch)
        try:
            found = check_file(path, batch.endpoint, *limits)
        except FileNotFoundError:
            log.error("batch %s: its file %s is gone from the disk", batch.batch_id, path)
            return self._failed(batch, "file_lost", "its input file is lost: upload it again")
        if found is None:
            return self.store.batch(batch.tenant, batch.batch_id) or batch
        if file is not None and found.sha256 not in (None, file.sha256):
            log.error("batch %s: its file %s is not what was uploaded", batch.batch_id, path)
            said = "its input file was changed after the upload: upload it again"
            return self._failed(batch, "file_changed", said)
        if found.errors or found.model is None:
            return self._refused(batch, found.errors)
        return self.store.begin_batch(batch.batch_id, found.model, found.requests)

    def _submitted(self, batch: BatchRow) -> BatchRow:
        job = self.client.find(batch.tenant, batch.batch_id)  # an earlier attempt's
        left_sec = batch.expires_at - time.time()
        if job is None and batch.cancelling_at is not None:
            return self._ended(batch, BatchEnd(BatchStatus.CANCELLED))
        if job is None and left_sec <= 0:
            return self._ended(batch, BatchEnd(BatchStatus.EXPIRED))
        if job is None:
            model = self.models.get(batch.model or "")
            if model is None:
                said = "its model is not served any more"
                return self._failed(batch, "model_not_found", said)
            try:
                job = self._new_job(batch, model, left_sec)
            except OverBudgetError as error:
                return self._failed(batch, "token_limit_exceeded", str(error))
            except UsageError as error:  # will not pass
                log.error("batch %s cannot be submitted: %s", batch.batch_id, error)
                return self._failed(batch, "batch_failed", without_places(str(error)))
        return self.store.note_batch_job(batch.batch_id, job.job_id)

    def _new_job(self, batch: BatchRow, model: ServedModel, left_sec: float) -> JobRow:
        source = self.file_store.path_of(batch.input_file_id)
        output = self.file_store.output_of(batch.batch_id)
        spec = model.spec(source, batch.endpoint, output, batch.tenant, left_sec)
        job, _ = self.client.submit(spec, batch.batch_id, batch.requests)
        said = "batch %s of tenant %s begins: job %s, %d requests of model %s"
        log.info(said, batch.batch_id, batch.tenant, job.job_id, batch.requests, batch.model)
        return job

    def _must_stop(self, batch: BatchRow) -> bool:
        """Whether the check of its file is of no use any more."""
        now = self.store.batch(batch.tenant, batch.batch_id)
        return self._closing or now is None or now.phase is BatchPhase.ENDED

    def _failed(self, batch: BatchRow, code: str, message: str) -> BatchRow:
        return self._refused(batch, [failure(code, message)])

    def _refused(self, batch: BatchRow, errors: Sequence[Mapping[str, Any]]) -> BatchRow:
        """A private tenant's words are not quoted."""
        told = [
            {**error, "message": self.privacy.sentence(batch.tenant, error["message"])}
            for error in errors
        ]
        return self._ended(batch, BatchEnd(BatchStatus.FAILED, errors=tuple(told)))

    def _ended(self, batch: BatchRow, end: BatchEnd) -> BatchRow:
        ended = self.store.end_batch(batch.batch_id, end)
        log.info("batch %s of tenant %s ends: %s", batch.batch_id, batch.tenant, ended.status)
        return ended

    def _run(self) -> None:
        while not self._closing:
            self._awake.clear()
            try:
                self.step_all()
            except Exception:
                log.exception("the batches could not be looked at; it is tried again")
            self._awake.wait(EVERY_SEC)
