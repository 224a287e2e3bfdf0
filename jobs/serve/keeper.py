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
from dataclasses import dataclass, field

from specbatch.jobs.serve.batches import seconds_of
from specbatch.jobs.serve.checking import check_file
from specbatch.jobs.serve.collecting import collect
from specbatch.jobs.serve.models import ServedModel
from specbatch.jobs.serve.shelf import Shelf
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.errors import SpecbatchError
from specbatch.schemas.serving import BatchEnd, BatchPhase, BatchRow, BatchStatus

log = logging.getLogger(__name__)

EVERY_SEC = 0.5
CANCELLED = "cancelled by its client"


@dataclass(slots=True)
class Keeper:
    """The steps of all open batches."""

    store: Store
    client: Client
    shelf: Shelf
    models: dict[str, ServedModel]
    most_requests: int
    _awake: threading.Event = field(default_factory=threading.Event)
    _said: dict[str, str] = field(default_factory=dict)  # by batch: why it waits
    _closing: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
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
        """One step of each open batch, oldest first."""
        for batch in self.store.open_batches():
            if self._closing:
                return
            try:
                self.step(batch)
            except (SpecbatchError, OSError) as error:  # the next round tries it again
                if self._said.get(batch.batch_id) != str(error):
                    log.warning("batch %s waits: %s", batch.batch_id, error)
                    self._said[batch.batch_id] = str(error)

    def step(self, batch: BatchRow) -> None:
        """Raises `SpecbatchError` and `OSError`; the next round then begins where this one did."""
        if batch.phase is BatchPhase.NEW:
            batch = self._checked(batch)
        if batch.phase is BatchPhase.RUNNING and batch.job_id is None:
            batch = self._submitted(batch)
        if batch.phase is BatchPhase.ENDED or batch.job_id is None:
            return
        job = self.store.get_job(batch.job_id)
        if job.state.is_final:
            self.store.end_batch(batch.batch_id, collect(self.shelf, batch, job))
        elif batch.cancelling_at is not None and not job.cancel_requested:
            self.client.cancel(job.job_id, CANCELLED)

    def _checked(self, batch: BatchRow) -> BatchRow:
        path = self.shelf.path_of(batch.input_file_id)
        try:
            found = check_file(path, batch.endpoint, self.models, self.most_requests)
        except FileNotFoundError:
            log.error("batch %s: its file %s is gone from the disk", batch.batch_id, path)
            return self._failed(batch, "file_lost", "its input file is lost: upload it again")
        if found.errors or found.model is None:
            end = BatchEnd(BatchStatus.FAILED, errors=tuple(found.errors))
            return self.store.end_batch(batch.batch_id, end)
        return self.store.begin_batch(batch.batch_id, found.model, found.requests)

    def _submitted(self, batch: BatchRow) -> BatchRow:
        # The list of models may have changed since an earlier attempt.
        job = self.client.find(batch.tenant, batch.batch_id)
        if job is None:
            model = self.models.get(batch.model or "")
            if model is None:
                return self._failed(batch, "model_not_found", "its model is served no more")
            window_sec = seconds_of(batch.completion_window) or 0.0
            paths = self.shelf.path_of(batch.input_file_id), self.shelf.output_of(batch.batch_id)
            spec = model.spec(paths[0], batch.endpoint, paths[1], batch.tenant, window_sec)
            job, _ = self.client.submit(spec, batch.batch_id)
        return self.store.note_batch_job(batch.batch_id, job.job_id)

    def _failed(self, batch: BatchRow, code: str, message: str) -> BatchRow:
        error = {"code": code, "message": message, "line": None, "param": None}
        return self.store.end_batch(batch.batch_id, BatchEnd(BatchStatus.FAILED, errors=(error,)))

    def _run(self) -> None:
        while not self._closing:
            self._awake.clear()
            try:
                self.step_all()
            except Exception:
                log.exception("the batches could not be looked at; it is tried again")
            self._awake.wait(EVERY_SEC)
