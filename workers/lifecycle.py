"""Starts worker processes, and the embedded worker that is a thread."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol

from celery import Celery, _state
from celery.apps import worker as celery_worker
from celery.worker import WorkController, state

from specbatch.pipeline.bootstrap import (
    KINDS,
    FakeModels,
    Worker,
    follow_leader,
    make_exposure,
    make_worker,
)
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.observe.tracing.job_logs import kept_by_job
from specbatch.pipeline.runtime.client import Enqueue
from specbatch.pipeline.runtime.leases import owner_here
from specbatch.schemas.errors import StepHungError, UsageError, WorkerEndedError
from specbatch.schemas.records import PRIORITIES, Stage
from specbatch.schemas.routing import queue_for
from specbatch.schemas.settings import Settings
from specbatch.workers.app import make_app, make_enqueue, make_queue_length
from specbatch.workers.consumer import Consuming, refuse_compression
from specbatch.workers.hints import RefillChannel
from specbatch.workers.shutdown import (
    FatalShutdown,
    GracefulShutdown,
    LossNotice,
    Restart,
    end_at_once,
)
from specbatch.workers.tasks import register

log = logging.getLogger(__name__)

PATIENCE_SEC = 10.0  # for tasks once a signal came: shorter than an orchestrator's grace period

_ORDER = ("ingest", "record", "propose", "verify")
_ALONE = {"without_gossip": True, "without_mingle": True, "without_heartbeat": True}


def queue_names(kinds: tuple[str, ...], verifier: str | None, proposer: str | None) -> list[str]:
    """The queues of a worker of these kinds, higher priorities of each kind first.

    Ingest and record come before work for models, behind which they would wait for hours.
    """
    model = {"propose": proposer, "verify": verifier}
    return [
        queue_for(Stage(kind), model.get(kind), priority)
        for kind in sorted(kinds, key=_ORDER.index)
        for priority in range(len(PRIORITIES))
    ]


def _unsaid(*_: object) -> None:
    """Replaces Celery's last words on stdout: they are no JSON log line."""


class Watch(Protocol):
    """Notices, in a thread of its own, when a worker must start anew."""

    def start(self, store: Store, lease_sec: float, on_change: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


def run_worker(
    settings: Settings,
    kinds: tuple[str, ...],
    verifier: str | None,
    proposers: tuple[str, ...],
    concurrency: int,
    fake_models: FakeModels | None = None,
    wrap_enqueue: Callable[[Enqueue], Enqueue] = lambda enqueue: enqueue,
    watch: Watch | None = None,
) -> bool:
    """Work in the foreground until a signal or `watch` ends it: tasks have `PATIENCE_SEC` to end,
    then their groups are given back. Returns whether the process is to start anew (`start_anew`).

    The first of the proposers is the main one, and the one that a propose worker serves.
    `fake_models` replace real ones; `wrap_enqueue` may change how work is enqueued. If processes
    share a model, the first one works and answers signals.

    Raises `DeviceLostError` when the device is gone and all groups are given back,
    `BrokerLostError` when no messages could be taken for long, and `WorkerEndedError` when nobody
    asked for the end. Their exit code tells a supervisor to restart the worker.
    """
    if settings.tensor_parallel > 1 and os.environ.get("RANK", "0") != "0":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    if follow_leader(settings):
        return False
    refuse_compression()
    if settings.log_format == "json":
        celery_worker.safe_say = _unsaid
    app = make_app(settings)
    channel = RefillChannel(app)
    proposer, extra = (proposers[0] if proposers else None), proposers[1:]
    with (
        keeping_logs(settings),
        ExitStack() as measured,
        FatalShutdown() as fatal,
        Restart() as restart,
    ):
        app.consuming = Consuming(settings.broker_reconnects, fatal)
        exposure = make_exposure(settings, app.consuming.trouble)
        if exposure is not None:
            measured.callback(exposure.close)
        worker = make_worker(
            settings,
            kinds,
            wrap_enqueue(make_enqueue(app)),
            verifier,
            proposer,
            hint_channel=channel,
            extra_draft_models=extra,
            fake_models=fake_models,
            queue_length=make_queue_length(app),
            meter=None if exposure is None else exposure.meter,
            trouble=app.consuming.trouble,
        )
        if exposure is not None:
            exposure.watch(worker.store.figures)
        register(app, worker, fatal)
        worker.start()
        if worker.refills is not None:
            channel.start(worker.hint)
        try:
            lost = LossNotice(settings.loss_notice_file)
            with GracefulShutdown(worker, PATIENCE_SEC), lost:
                if watch is not None:
                    watch.start(worker.store, settings.lease_sec, restart)
                consume(app, queue_names(kinds, verifier, proposer), concurrency)
        finally:
            if watch is not None:
                watch.close()
            measured.close()  # first: it reads the store
            channel.close()
            worker.close()
    given_up = fatal.error if isinstance(fatal.error, StepHungError) else worker.out_of_step
    if given_up is not None:
        end_at_once(given_up)
    if fatal.error is not None:
        raise fatal.error
    return restart.is_due


def keeping_logs(settings: Settings) -> AbstractContextManager[None]:
    """Keeps what this worker logs in the files of its jobs. Does nothing where the caller shows no
    logs: Celery would take our handler for the caller's, and its own lines would be lost."""
    if not logging.getLogger().handlers:
        return nullcontext()
    days, access = settings.job_log_days, settings.store_mode
    return kept_by_job(settings.workspace, owner_here(), days, access)


def consume(app: Celery, queues: list[str], concurrency: int) -> None:
    """Take messages until a signal, or `FatalShutdown`, ends it.

    Raises `WorkerEndedError` if neither did: Celery logs why its consumer died, and returns as if
    all were well.
    """
    app.Worker(
        pool="specbatch.workers.shutdown:Threads",
        concurrency=concurrency,
        queues=queues,
        loglevel="WARNING",
        quiet=True,  # no banner: it shows settings that are not ours
        **_ALONE,
    ).start()
    asked = (state.should_stop, state.should_terminate)
    if all(code is None or code is False for code in asked):  # 0 is SIGTERM's
        raise WorkerEndedError("the worker stopped unexpectedly: its log says why; restart it")


@contextmanager
def embedded(
    settings: Settings,
    verifier: str,
    proposer: str | None,
    store: Store | None = None,
    concurrency: int = 16,
    kinds: tuple[str, ...] = KINDS,
    only_job: str | None = None,
    extra_draft_models: Sequence[str] = (),
) -> Iterator[tuple[Celery, Worker]]:
    """These kinds of work in this process: the same tasks, also on a broker in memory.

    `only_job`: work of no other job is taken. `extra_draft_models` stand beside the proposer.

    When the device is gone the worker dies (`is_alive`), its groups given back.
    """
    if settings.tensor_parallel > 1:
        raise UsageError("SPECBATCH_TENSOR_PARALLEL is for `specbatch worker`: unset it here")
    kinds = kinds if proposer else tuple(k for k in kinds if k != "propose")
    app = make_app(settings)
    fatal = FatalShutdown()
    app.consuming = Consuming(settings.broker_reconnects, fatal)
    worker = make_worker(
        *(settings, kinds, make_enqueue(app), verifier, proposer, store),
        queue_length=make_queue_length(app),
        trouble=app.consuming.trouble,
        only_job=only_job,
        extra_draft_models=extra_draft_models,
    )
    register(app, worker, fatal)
    # Pool threads look the app up by this, and fail without a word otherwise. (To be the current
    # app is a matter of one thread, and these come later.) A host's own gets its place back.
    default_before = _state.default_app
    app.set_default()
    controller = WorkController(
        app=app,
        pool_cls="threads",
        concurrency=concurrency,
        queues=queue_names(kinds, verifier, proposer),
        loglevel=logging.WARNING,
        **_ALONE,
    )
    thread = threading.Thread(target=controller.start, name="celery", daemon=True)
    app.embedded = thread
    thread.start()
    worker.start()
    # Of a host that has not set up its logging nothing is kept: that would set it up.
    with keeping_logs(settings):
        try:
            with fatal:
                yield app, worker
        finally:
            worker.close()  # first: waiting tasks return, their groups are given back
            controller.stop()
            thread.join(timeout=30)
            _state.set_default_app(default_before)


def is_alive(app: Celery) -> bool:
    """Whether the embedded worker of this app still runs; if not, nobody does its tasks."""
    return bool(app.embedded.is_alive())
