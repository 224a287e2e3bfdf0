"""The embedded runner: does the jobs of open batches one after the other, as `submit-job --local`.

It is a process of its own: no slow client holds it up, and what it had begun when it or the service
died is resumed by the next runner. A lock on the folder sees to it that there is one at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext

from specbatch.jobs.running.here import Watcher, run_job
from specbatch.jobs.serve.collecting import not_run
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.errors import ObjectError, StoreError, UsageError
from specbatch.schemas.records import JobRow
from specbatch.schemas.serving import BatchRow
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import spec_of

log = logging.getLogger(__name__)

EVERY_SEC = 0.3
PAUSE_SEC = 5.0  # after what may pass by itself
NOT_SERVED = "its model cannot be run here"


def next_job(store: Store) -> tuple[BatchRow, JobRow] | None:
    """The job to do now: one that is being stopped, which is quick, else the oldest."""
    begun = [(b, store.get_job(b.job_id)) for b in store.open_batches() if b.job_id is not None]
    waiting = [(batch, job) for batch, job in begun if not job.state.is_final]
    stopping = [(batch, job) for batch, job in waiting if job.cancel_requested]
    return next(iter([*stopping, *waiting]), None)


def run_jobs(settings: Settings, store: Store, client: Client, closing: threading.Event) -> None:
    """Do jobs until the event is set. Raises `EngineError` when this process can do no more: the
    next one resumes. `JobInterrupted` on Ctrl-C and SIGTERM."""
    while not closing.is_set():
        try:
            if not run_next(settings, store, client, closing.is_set):
                closing.wait(EVERY_SEC)
        except (StoreError, ObjectError) as error:
            log.warning("jobs wait: %s", error)
            closing.wait(PAUSE_SEC)


def run_next(
    settings: Settings,
    store: Store,
    client: Client,
    wants_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Do one job, if there is one. Raises as `run_jobs`, and `StoreError` and `ObjectError`."""
    found = next_job(store)
    if found is None:
        return False
    batch, job = found
    watcher = Watcher(lambda: nullcontext(lambda *_: None), log.info, wants_stop)
    log.info("job %s of tenant %s begins", job.job_id, job.tenant)
    try:
        run_job(settings, spec_of(job), job, watcher)
    except UsageError as error:  # will not pass: its model's files, or its numeric class
        log.error("job %s cannot be run: %s", job.job_id, error)
        # The job cannot even be published here; what it has finished stays in the store.
        store.end_batch(batch.batch_id, not_run(job.job_id))
        client.cancel(job.job_id, NOT_SERVED)
    return True
