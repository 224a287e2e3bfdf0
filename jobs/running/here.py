"""A job done in this process: the same tasks on a broker in memory, followed to the job's end.

Knows nothing of terminals and exit codes: `Watcher` shows progress, errors say how a job ended.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbatch.pipeline.bootstrap import make_client, make_store, with_proposer
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.observe.terminal.progress import EngineCounts, resume_command
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.errors import (
    BrokenModelError,
    EngineError,
    JobInterrupted,
    ModelChangedError,
    ModelLostError,
    ObjectError,
    StoreError,
    UsageError,
    WaitTimeoutError,
)
from specbatch.schemas.fingerprint import TEXT_PARTS, compared, differing
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.numeric_class import Pinned, Serves
from specbatch.schemas.patience import end_within
from specbatch.schemas.records import DueWork, JobRow
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec

if TYPE_CHECKING:
    from celery import Celery

    from specbatch.pipeline.bootstrap import Worker

EVERY_SEC = 0.2
# Celery has one broker in memory and one current app for a whole process.
_ONE_AT_A_TIME = threading.Lock()
IN_MEMORY = "memory://localhost/"

Show = Callable[[JobProgress, EngineCounts | None], None]


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who watches a job: where its progress is shown and remarks go, and whether it must stop.

    `takes_sigterm`: the process has its own handler of SIGTERM, which raises `KeyboardInterrupt`.
    """

    view: Callable[[], AbstractContextManager[Show]]
    remark: Callable[[str], None]
    wants_stop: Callable[[], bool] = lambda: False
    takes_sigterm: bool = False


def run_job(
    settings: Settings,
    spec: JobSpec,
    job: JobRow,
    watcher: Watcher,
    timeout_sec: float | None = None,
    how_to_go_on: str | None = None,
) -> None:
    """Work until the job ends; finished groups stay, others are given back if it stops before.

    `how_to_go_on`: in words, what resumes it. Raises `JobInterrupted` after Ctrl-C and where the
    watcher wants a stop, `WaitTimeoutError` in the same way, `EngineError` when the worker here
    died, and `UsageError` for a job of a model or numeric class that this process does not have.
    """
    if job.state.is_final:
        return
    check_place(settings, spec)
    end_within(None)  # what stops at the timeout gives its groups back, which takes its time
    settings = with_proposer(settings, spec.vllm_proposer)
    settings = settings.model_copy(update={"broker_url": IN_MEMORY})
    hint = how_to_go_on or f"`{resume_command(job.job_id)}`"
    try:
        from specbatch.workers.app import make_enqueue
        from specbatch.workers.lifecycle import embedded

        with closing(make_store(settings)) as store:
            beside = _before_it_begins(settings, store, job)
        models = (spec.verifier, job.proposer if spec.vllm_proposer is None else None)
        with (
            nullcontext() if watcher.takes_sigterm else _sigterm_as_interrupt(),
            _alone(watcher, timeout_sec),
            embedded(settings, *models, only_job=job.job_id, extra_draft_models=beside) as (
                app,
                worker,
            ),
        ):
            check_served(worker, job.job_id, spec)
            here = make_client(
                settings, make_enqueue(app), worker.store, worker.lease_keeper.check_cancelled
            )
            _follow(here, app, worker, job, spec, watcher, timeout_sec)
    except KeyboardInterrupt:
        raise JobInterrupted(
            f"job {job.job_id} stopped; its finished groups are kept. To resume it: {hint}",
            job_id=job.job_id,
        ) from None
    except (StoreError, ObjectError) as error:
        if error.refused:
            raise type(error)(
                f"{error}. Job {job.job_id} is kept; to resume it then: {hint}"
            ) from None
        raise
    except WaitTimeoutError:
        raise WaitTimeoutError(
            f"job {job.job_id} did not end within {timeout_sec:g} s and was stopped; "
            f"to resume it: {hint}"
        ) from None


@contextmanager
def _alone(watcher: Watcher, timeout_sec: float | None) -> Iterator[None]:
    """Wait until no other thread of this process runs a job. Raises `KeyboardInterrupt` where the
    watcher wants a stop, and `WaitTimeoutError`."""
    until = math.inf if timeout_sec is None else time.monotonic() + timeout_sec
    while not _ONE_AT_A_TIME.acquire(timeout=EVERY_SEC):
        if watcher.wants_stop():
            raise KeyboardInterrupt
        if time.monotonic() >= until:
            raise WaitTimeoutError("another job of this process did not end in time")
    try:
        yield
    finally:
        _ONE_AT_A_TIME.release()


def _before_it_begins(settings: Settings, store: Store, job: JobRow) -> list[str]:
    """Free what an earlier process held, before the first sweep, and promote what rollouts found
    better. Returns the draft models to load beside the job's own."""
    from specbatch.pipeline.learning.registry import loaded_beside

    def silent(_work: DueWork) -> None:
        """The worker here sweeps the store."""

    make_client(settings, silent, store).take_over(job.job_id)
    store.settle_rollouts()
    return loaded_beside(store, job)


def check_place(settings: Settings, spec: JobSpec) -> None:
    """Raise `UsageError` for a job whose rows may not be in this process."""
    from specbatch.pipeline.bootstrap import site_of

    site = site_of(settings)
    if not spec.placement.allows(site):
        where = f"region {site.region}{', on spot' if site.is_spot else ''}"
        raise UsageError(
            f"the job's rows may only be {spec.placement.words}, and this process is in {where}: "
            "submit it without --local, to workers that may have them, or correct SPECBATCH_REGION "
            "and SPECBATCH_TENURE"
        )


def check_served(worker: Worker, job_id: str, spec: JobSpec) -> None:
    """Raise `UsageError` for a job begun with another model or in another numeric class than this
    process has.

    There may be no other worker to resume it.
    """
    serves, job = worker.engines[0].serves(), worker.store.get_job(job_id)
    if serves.takes(Pinned.of(job)):
        return
    if not serves.has_model(job.model_fingerprint):
        raise _of_other_files(job, serves)
    if job.proposer_fingerprint not in (None, *serves.drafts):
        raise UsageError(
            f"draft model `{job.proposer}` has other files than job {job_id} began with, on which "
            f"its outputs depend under verification {spec.speculation.verification}: put those back"
        )
    here = serves.class_of(spec.key_in(job.numeric_class))
    raise UsageError(
        f"job {job_id} is verified in numeric class {job.numeric_class}, and this process has "
        f"{here}: run it on the same kind of machine with the same number of threads, or move it "
        f"with `specbatch retry {job_id} --local --numeric-class {here}`"
    )


def _of_other_files(job: JobRow, serves: Serves) -> ModelChangedError:
    if serves.fingerprint is None:
        return ModelChangedError(f"the files of model `{job.verifier}` cannot be read now")
    how = compared(str(job.model_fingerprint), job.model_parts, serves.fingerprint)
    other = f"continue with these by `{resume_command(job.job_id)} --accept-model`"
    if set(differing(job.model_parts, serves.fingerprint.parts)) & set(TEXT_PARTS):
        other = "submit a new job"  # what is read already is tokens
    return ModelChangedError(
        f"model `{job.verifier}` has {how}: job {job.job_id} needs the files that it began with; "
        f"put those back, or {other}"
    )


def _follow(
    c: Client,
    app: Celery,
    worker: Worker,
    job: JobRow,
    spec: JobSpec,
    watcher: Watcher,
    timeout_sec: float | None,
) -> None:
    from specbatch.workers.lifecycle import is_alive

    try:
        with watcher.view() as show:
            for progress in c.follow(job.job_id, EVERY_SEC, timeout_sec):
                show(progress, engine_counts(worker))
                if watcher.wants_stop() and not progress.state.is_final:
                    raise KeyboardInterrupt
                if worker.outage.refused is not None:
                    raise worker.outage.refused
                check_served(worker, job.job_id, spec)  # files may change before they are loaded
                if not is_alive(app) and not progress.state.is_final:
                    _check_model(worker, job)
                    raise EngineError(
                        f"the worker in this process died, so job {job.job_id} cannot continue; "
                        f"its log is above. Try `{resume_command(job.job_id)}`"
                    )
    except KeyboardInterrupt:
        watcher.remark("stopping after the current step ...")
        raise


def _check_model(worker: Worker, job: JobRow) -> None:
    """Raise `BrokenModelError` where the worker ended for its model."""
    for host in worker.engines:
        try:
            host.check()
        except ModelLostError as error:
            again = resume_command(job.job_id)
            raise BrokenModelError(
                f"{error}; job {job.job_id} is kept: then resume it with `{again}`"
            ) from None
        except EngineError:
            continue


def engine_counts(worker: Worker) -> EngineCounts:
    """What this process's engines have done: the verifying one first, then the drafting one."""
    verifying, drafting = ([*worker.engines, None, None])[:2]
    stats: list[Any] = list(verifying.stats) if verifying else []
    return EngineCounts(
        finished=sum(s.finished for s in stats),
        tokens=sum(s.generated_tokens for s in stats),
        proposed=sum(s.proposed for s in stats),
        accepted=sum(s.accepted for s in stats),
        drafted=sum(s.generated_tokens for s in drafting.stats) if drafting else 0,
        is_loaded=bool(stats),
    )


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """An orchestrator's polite end is treated like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
