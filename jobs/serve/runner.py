"""The embedded runner: does the jobs of open batches one after the other, as `submit-job --local`.

Tenants take turns by the rule of the fleet's claims. As each job has the process to itself, a turn
is long: what a tenant has had beyond its share is looked at, and a job stops for another tenant's.

It is a process of its own: no slow client holds it up, and what it had begun when it or the service
died is resumed by the next runner. A lock on the folder sees to it that there is one at a time.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from specbatch.jobs.running.here import Watcher, run_job
from specbatch.jobs.serve.collecting import not_run
from specbatch.jobs.serve.errors import without_places
from specbatch.jobs.serve.reconciler import CANCELLED
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.fair_share import Turn
from specbatch.pipeline.ledger.rules import reason_to_stop
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.errors import (
    JobInterrupted,
    ModelError,
    ObjectError,
    StoreError,
    UsageError,
)
from specbatch.schemas.records import JobRow, JobState
from specbatch.schemas.serving import BatchRow
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import spec_of

log = logging.getLogger(__name__)

EVERY_SEC = 0.3
AWAY_SEC = 30.0  # before a model folder that is missing is looked for again
LOOK_EVERY_SEC = 2.0  # at whether a running job has to stop for others
SLICE_SEC = 300.0  # device seconds beyond its share, after which a tenant's job stops for others
PAUSE_SEC = 5.0  # after what may pass by itself
NOT_SERVED = "its model cannot be run here"


def next_job(
    store: Store, service_id: str, passed_over: Collection[str] = ()
) -> tuple[BatchRow, JobRow] | None:
    """The job to do now: one that is to stop, which is quick, else the first in fair-share order
    that is not passed over and does not wait for a budget of its tenant. `passed_over`: ids of
    batches that cannot be done by this process."""
    waiting, able = _in_line(store, service_id, passed_over)
    stopping = (job.job_id for batch, job in waiting.values() if _must_stop(batch, job))
    first = next(stopping, None) or next((turn.job.job_id for turn in able), None)
    return None if first is None else waiting[first]


def _in_line(
    store: Store, service_id: str, passed_over: Collection[str], running: str | None = None
) -> tuple[dict[str, tuple[BatchRow, JobRow]], list[Turn]]:
    """All jobs that have not ended, and in fair-share order those that can be done now."""
    open_ones = store.open_batches(service_id)
    with_jobs = [(batch, batch.job_id) for batch in open_ones if batch.job_id is not None]
    jobs = store.jobs_of_ids([job_id for _, job_id in with_jobs])
    begun = [(batch, jobs[job_id]) for batch, job_id in with_jobs if job_id in jobs]
    waiting = {job.job_id: (batch, job) for batch, job in begun if not job.state.is_final}
    held_back = store.waiting_for_budget(list(waiting))
    for job_id, (batch, _) in waiting.items():
        if job_id in held_back and batch.waits_because is None:
            store.note_batch_waits(batch.batch_id, held_back[job_id])
    able = [
        job_id
        for job_id, (batch, _) in waiting.items()
        if batch.batch_id not in passed_over and job_id not in held_back
    ]
    return waiting, store.in_turn(able, running)


def _must_stop(batch: BatchRow, job: JobRow) -> bool:
    return job.cancel_requested or batch.expires_at <= time.time()


def is_away(job: JobRow) -> bool:
    """Whether a model folder of the job is not there, as while its disk is not mounted."""
    folders = [Path(ref) for ref in (job.verifier, job.proposer) if ref and ref.startswith("/")]
    return not all(folder.is_dir() and os.access(folder, os.R_OK) for folder in folders)


@dataclass(slots=True)
class Watch:
    """Looks whether the running job has to stop for others: it only waits for a budget, or its
    tenant has had enough beyond its share. It does not stop before a group has ended: a turn in
    which nothing is done would be taken again and again."""

    store: Store
    service_id: str
    job: JobRow
    passed_over: Collection[str]
    words: str = ""  # what it waits for
    gives_way: bool = False
    _next_at: float = 0.0
    _groups_before: int = field(init=False)  # ended in earlier turns

    def __post_init__(self) -> None:
        self._groups_before = self._groups_done()

    def wants_stop(self) -> bool:
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + LOOK_EVERY_SEC
            job_id = self.job.job_id
            self.words = self.store.waiting_for_budget([job_id]).get(job_id, "")
            if not self.words:
                _, turns = _in_line(self.store, self.service_id, self.passed_over, job_id)
                is_due = gives_way(self.job, turns)
                self.gives_way = is_due and self._groups_done() > self._groups_before
        return bool(self.words) or self.gives_way

    def _groups_done(self) -> int:
        return self.store.progress(self.job.job_id).groups_done


def gives_way(job: JobRow, turns: Sequence[Turn]) -> bool:
    """Whether the running job is to stop for the first in fair-share order, another tenant's.

    Only what its groups took counts: those under way are charged with estimates.
    """
    own = next((turn for turn in turns if turn.job.job_id == job.job_id), None)
    if own is None or turns[0].job.tenant == job.tenant:
        return False
    ahead_sec = (own.job.served - own.reached) * own.job.weight
    return ahead_sec - own.job.under_way_sec >= SLICE_SEC


@dataclass(slots=True)
class Runner:
    """Does the jobs of one service's batches."""

    settings: Settings
    store: Store
    client: Client
    service_id: str
    _passed_over: dict[str, float] = field(default_factory=dict)  # by batch: until when
    _takes_sigterm: bool = False
    _must_end: bool = False

    def take_sigterm(self) -> None:
        """Handle SIGTERM of this process: also one that comes while a job stops for another one
        ends the runner."""
        signal.signal(signal.SIGTERM, self._end_process)
        self._takes_sigterm = True

    def _end_process(self, *_: object) -> NoReturn:
        self._must_end = True
        raise KeyboardInterrupt

    def run(self) -> None:
        """Do jobs for ever. Raises `EngineError` when this process can do no more: the next one
        resumes. `JobInterrupted` and `KeyboardInterrupt` on Ctrl-C and SIGTERM."""
        while True:
            try:
                if not self.run_next():
                    time.sleep(EVERY_SEC)
            except (StoreError, ObjectError) as error:
                log.warning("jobs wait: %s", error)
                time.sleep(PAUSE_SEC)

    def run_next(self) -> bool:
        """Do one job, if there is one. Raises as `run`, and `StoreError` and `ObjectError`."""
        now = time.monotonic()
        passed_over = {batch_id for batch_id, until in self._passed_over.items() if until > now}
        found = next_job(self.store, self.service_id, passed_over)
        if found is None:
            return False
        batch, job = found
        if batch.waits_because is not None:
            self.store.note_batch_waits(batch.batch_id, None)
        watch = Watch(self.store, self.service_id, job, passed_over)
        view, stop = (lambda: nullcontext(lambda *_: None)), watch.wants_stop
        watcher = Watcher(view, log.info, stop, self._takes_sigterm)
        try:
            run_job(self.settings, spec_of(job), job, watcher)
        except JobInterrupted:
            if self._must_end:
                raise
            if watch.words:
                log.warning("batch %s %s", batch.batch_id, watch.words)
                self.store.note_batch_waits(batch.batch_id, watch.words)
            elif watch.gives_way:
                log.info("batch %s stops for now: it is another tenant's turn", batch.batch_id)
            else:
                raise
        except ModelError as error:
            if is_away(job):
                self._pass_over(batch, self.store.get_job(job.job_id), error, AWAY_SEC)
                return True
            log.error("job %s cannot be run: %s", job.job_id, error)  # will not pass
            self._end(job, batch, JobState.FAILED, NOT_SERVED)
        except UsageError as error:
            self._pass_over(batch, self.store.get_job(job.job_id), error)
        return True

    def _pass_over(
        self, batch: BatchRow, job: JobRow, error: UsageError, sec: float = math.inf
    ) -> None:
        """For so long, or until the next start, perhaps on another machine: what is done already
        must not be lost. Where it is to stop anyway, it ends."""
        if _must_stop(batch, job):
            is_late = batch.cancelling_at is None and batch.expires_at <= time.time()
            reason = reason_to_stop(is_late, batch.expires_at, 0.0, None) or CANCELLED
            self._end(job, batch, JobState.CANCELLED, reason)
            return
        log.error("batch %s waits: %s", batch.batch_id, error)
        self._passed_over[batch.batch_id] = time.monotonic() + sec
        why = Privacy.of_settings(self.settings).words(job, without_places(str(error)))
        self.store.note_batch_waits(batch.batch_id, why)

    def _end(self, job: JobRow, batch: BatchRow, state: JobState, reason: str) -> None:
        """The job cannot even be published here; what it has finished stays in the store. It ends
        first: after a crash its batch follows it. Nobody else runs the jobs of this folder."""
        self.client.cancel(job.job_id, reason)
        error = NOT_SERVED if state is JobState.FAILED else None
        if not self.store.give_up_job(job.job_id, state, error):
            return  # it has ended meanwhile, and its batch follows it
        end = not_run(batch, self.store.get_job(job.job_id))
        self.store.end_batch(batch.batch_id, end)
        log.info("batch %s of tenant %s ends: %s", batch.batch_id, batch.tenant, end.status)
