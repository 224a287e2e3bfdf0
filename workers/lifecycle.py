"""Starts and stops worker processes, and the embedded worker that is a thread."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn
from weakref import WeakKeyDictionary

from celery import Celery, _state
from celery.apps import worker as celery_worker
from celery.signals import worker_shutting_down
from celery.worker import WorkController, state

from specbatch.pipeline.bootstrap import (
    KINDS,
    Models,
    Worker,
    follow_leader,
    make_exposure,
    make_worker,
)
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.client import Ring
from specbatch.schemas.errors import (
    BrokerLostError,
    DeviceLostError,
    StepHungError,
    UsageError,
    WorkerEndedError,
)
from specbatch.schemas.records import PRIORITIES, Stage
from specbatch.schemas.routing import queue_for
from specbatch.schemas.settings import Settings
from specbatch.workers.app import make_app, make_ring
from specbatch.workers.consumer import refuse_compression
from specbatch.workers.consuming import Consuming, tell
from specbatch.workers.hints import HintLine
from specbatch.workers.queue_lengths import make_queued
from specbatch.workers.tasks import register

log = logging.getLogger(__name__)

_STAGE_OF_KIND = {
    "ingest": Stage.INGEST,
    "propose": Stage.PROPOSE,
    "verify": Stage.VERIFY,
    "record": Stage.RECORD,
}
_ORDER = ("ingest", "record", "propose", "verify")


PATIENCE_SEC = 10.0  # for tasks once a signal came: shorter than an orchestrator's grace period

_embedded_threads: WeakKeyDictionary[Celery, threading.Thread] = WeakKeyDictionary()


class LastWord:
    """Ends this process's worker after a lost device or broker: no new tasks, those that run go to
    their end.

    Its flag is the one that Celery's own signal handlers set; the loop looks at it every second or
    two. It is global, so it is taken back when the worker has stopped.
    """

    def __init__(self) -> None:
        self.error: DeviceLostError | BrokerLostError | None = None

    def __call__(self, error: DeviceLostError | BrokerLostError) -> None:
        if self.error is None:
            log.critical("the worker ends, its groups are given back: %s", error)
            self.error = error
        state.should_stop = error.exit_code

    def __enter__(self) -> LastWord:
        return self

    def __exit__(self, *_: object) -> None:
        if self.error is not None:
            state.should_stop = None


class Farewell:
    """Lets tasks end for a while once a signal asks the worker to; then engines are stopped.

    Celery waits for its tasks for as long as they take, which may be longer than an orchestrator
    does. A task whose engine stops gives its group back; no engine is waited for here, as one may
    be loading its model. Who asks twice, or for a cold end, has no more patience.
    """

    def __init__(self, worker: Worker, patience_sec: float) -> None:
        self._worker = worker
        self._patience_sec = patience_sec
        self._is_over = False
        self._waited = threading.Event()  # enough, or the worker has ended
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Farewell:
        worker_shutting_down.connect(self._begin, weak=False)
        return self

    def __exit__(self, *_: object) -> None:
        worker_shutting_down.disconnect(self._begin)
        self._is_over = True
        self._waited.set()
        if self._thread is not None:
            self._thread.join()

    def _begin(self, how: str = "Warm", **_: object) -> None:
        self._worker.outage.close()
        if how == "Cold":
            self._waited.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="farewell", daemon=True)
            self._thread.start()

    def _wait(self) -> None:
        self._waited.wait(self._patience_sec)
        if not self._is_over:
            log.info("groups in hand are given back")
            for host in self._worker.engines:
                host.stop()


def queue_names(kinds: tuple[str, ...], verifier: str | None, proposer: str | None) -> list[str]:
    """The queues a worker of these kinds listens to, of each kind those of higher classes first.

    Reading and recording come before the models' work, which would let them wait for hours.
    """
    model = {"propose": proposer, "verify": verifier}
    return [
        queue_for(_STAGE_OF_KIND[kind], model.get(kind), priority)
        for kind in sorted(kinds, key=_ORDER.index)
        for priority in range(len(PRIORITIES))
    ]


def _unsaid(*_: object) -> None:
    """Celery's goodbye, which is no line of a log."""


def run_worker(
    settings: Settings,
    kinds: tuple[str, ...],
    verifier: str | None,
    proposers: tuple[str, ...],
    concurrency: int,
    fake_models: Models | None = None,
    through: Callable[[Ring], Ring] = lambda ring: ring,
) -> None:
    """Work in the foreground until a signal ends it: tasks have `PATIENCE_SEC` to end, then their
    groups are given back.

    The first of the proposers is the main one, and the one that a propose worker serves.
    `fake_models` takes the place of real models; bells go `through` something on their way out.
    Of processes that share a model, the first one works; a signal is its to answer.

    Raises `DeviceLostError` when the device is gone and all groups are given back,
    `BrokerLostError` when no messages could be taken for long, and `WorkerEndedError` when nobody
    asked for the end. Their exit code tells a supervisor to start the worker anew.
    """
    if settings.tensor_parallel > 1 and os.environ.get("RANK", "0") != "0":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    if follow_leader(settings):
        return
    refuse_compression()
    if settings.log_format == "json":
        celery_worker.safe_say = _unsaid
    app = make_app(settings)
    line = HintLine(app)
    proposer, extra_draft_models = (proposers[0] if proposers else None), proposers[1:]
    with ExitStack() as measured, LastWord() as lost:
        consuming = tell(app, Consuming(settings.broker_reconnects, lost))
        exposure = make_exposure(settings, consuming.trouble)
        if exposure is not None:
            measured.callback(exposure.close)
        worker = make_worker(
            settings,
            kinds,
            through(make_ring(app)),
            verifier,
            proposer,
            line=line,
            extra_draft_models=extra_draft_models,
            fake_models=fake_models,
            queued=make_queued(app),
            meter=None if exposure is None else exposure.meter,
            trouble=consuming.trouble,
        )
        if exposure is not None:
            exposure.watch(worker.store)
        register(app, worker, lost)
        worker.start()
        if worker.refills is not None:
            line.start(worker.hint)
        try:
            with Farewell(worker, PATIENCE_SEC):
                consume(app, queue_names(kinds, verifier, proposer), concurrency)
        finally:
            measured.close()  # first: it reads the store
            line.close()
            worker.close()
    given_up = lost.error if isinstance(lost.error, StepHungError) else worker.out_of_step
    if given_up is not None:
        end_at_once(given_up)
    if lost.error is not None:
        raise lost.error


def consume(app: Celery, queues: list[str], concurrency: int) -> None:
    """Take messages until a signal, or `LastWord`, ends it.

    Raises `WorkerEndedError` if neither did: Celery logs whatever its consumer dies of, and returns
    as if all were well.
    """
    app.Worker(
        pool="specbatch.workers.pool:Threads",
        concurrency=concurrency,
        queues=queues,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        loglevel="WARNING",
        quiet=True,  # no banner: it shows settings that are not ours
    ).start()
    asked = (state.should_stop, state.should_terminate)
    if all(code is None or code is False for code in asked):  # 0 is SIGTERM's
        raise WorkerEndedError(
            "the worker ended though nobody asked it to: its log says why; start it anew"
        )


def end_at_once(error: DeviceLostError) -> NoReturn:
    """End the process with its error's code: a usual end would wait for the native threads of the
    step that hangs, or for ranks that are out of step."""
    log.critical("%s", error)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(error.exit_code)


@contextmanager
def embedded(
    settings: Settings,
    verifier: str,
    proposer: str | None,
    store: Store | None = None,
    concurrency: int = 16,
    kinds: tuple[str, ...] = KINDS,
    only_job: str | None = None,
) -> Iterator[tuple[Celery, Worker]]:
    """These kinds of work in this process: the same tasks, also on a broker in memory.

    `only_job`: work of no other job is taken.

    When the device is gone the worker dies (`is_alive`), its groups given back.
    """
    if settings.tensor_parallel > 1:
        raise UsageError("SPECBATCH_TENSOR_PARALLEL is for `specbatch worker`: unset it here")
    kinds = kinds if proposer else tuple(k for k in kinds if k != "propose")
    app = make_app(settings)
    lost = LastWord()
    consuming = tell(app, Consuming(settings.broker_reconnects, lost))
    worker = make_worker(
        *(settings, kinds, make_ring(app), verifier, proposer, store),
        queued=make_queued(app),
        trouble=consuming.trouble,
        only_job=only_job,
    )
    register(app, worker, lost)
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
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    thread = threading.Thread(target=controller.start, name="celery", daemon=True)
    _embedded_threads[app] = thread
    thread.start()
    worker.start()
    try:
        with lost:
            yield app, worker
    finally:
        worker.close()  # first: waiting tasks return, their groups are given back
        controller.stop()
        thread.join(timeout=30)
        _state.set_default_app(default_before)


def is_alive(app: Celery) -> bool:
    """Whether the embedded worker of this app still runs; if not, nobody does its tasks."""
    thread = _embedded_threads.get(app)
    return thread is not None and thread.is_alive()
