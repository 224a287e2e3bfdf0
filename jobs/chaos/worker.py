"""A worker process for disturbances: the ordinary worker with armed crash points.

Its `Order` came through a pipe (so no password is among arguments); an `Arming` per run follows.
The worker reports each disturbance through the pipe before it fires, and ends when the other end
closes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from celery.signals import worker_ready
from celery.worker import state

from specbatch.jobs.chaos import clock, stand_in_model
from specbatch.jobs.chaos.faults import Armed
from specbatch.jobs.chaos.orders import Arming, Ask, Busy, Event, Fired, IsArmed, Order, Ready
from specbatch.jobs.chaos.stand_in import NUMERIC_CLASS, StandInHost
from specbatch.pipeline.bootstrap import FakeModels
from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.runtime.client import Enqueue
from specbatch.schemas import crash_points
from specbatch.schemas.errors import DeviceLostError, WorkerEndedError
from specbatch.schemas.records import DueWork
from specbatch.schemas.settings import Settings
from specbatch.workers.lifecycle import run_worker

AGREEMENT = 0.8  # of the stand-in's draft model
_COPIES = (1, 1, 2, 3)
_HELD_BACK = 0.4  # of all messages, until others are sent; the last ones for ever


@dataclass(slots=True)
class Line:
    """This process's end of the pipe. Thread-safe."""

    connection: Connection
    number: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, event: Event) -> None:
        with self.lock, contextlib.suppress(OSError):  # the supervisor has ended
            self.connection.send(event)

    def listen(self, armed: Armed, queue: UnrulyQueue) -> None:
        """Take what comes until the other end is gone; then this process goes, too."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message: Arming | Ask = self.connection.recv()
                if isinstance(message, Ask):
                    self.send(Busy(len(state.reserved_requests)))
                    continue
                armed.arm(message)
                queue.seed(message.message_seed)
                clock.set_ahead(skew_of(message, self.number))
                self.send(IsArmed(message.run))
        os._exit(1)


class UnrulyQueue:
    """Doubles work messages, holds them back and sends them in another order, as brokers may do.

    It passes them on as they are while its seed is None.
    """

    def __init__(self) -> None:
        self._enqueue: Enqueue | None = None
        self._draw: random.Random | None = None
        self._held: list[DueWork] = []
        self._lock = threading.Lock()

    def seed(self, seed: int | None) -> None:
        """Be unruly in the way of this seed, or not at all."""
        with self._lock:
            self._draw = None if seed is None else random.Random(seed)

    def wrap(self, enqueue: Enqueue) -> Enqueue:
        """Send messages by `enqueue` from now on, and raise what it raises."""
        self._enqueue = enqueue
        return self

    def __call__(self, work: DueWork) -> None:
        assert self._enqueue is not None
        for each in self._next(work):
            self._enqueue(each)

    def _next(self, work: DueWork) -> list[DueWork]:
        with self._lock:
            if self._draw is None:
                messages, self._held = [*self._held, work], []
                return messages
            messages = [*self._held, *[work] * self._draw.choice(_COPIES)]
            self._draw.shuffle(messages)
            # Drawn by copy: copies are equal, and one may go now and another later.
            drawn = [(each, self._draw.random() >= _HELD_BACK) for each in messages]
            self._held = [each for each, goes_now in drawn if not goes_now]
            return [each for each, goes_now in drawn if goes_now]


def work(order: Order, connection: Connection) -> int:
    """Run the worker until it is ended. Returns the exit code."""
    _write_to(Path(order.log))
    tempfile.tempdir = str(Path(order.log).parent)  # what a killed one leaves there goes with it
    if order.home:
        os.chdir(order.home)
    line, queue = Line(connection, order.number), UnrulyQueue()
    settings = Settings(**order.settings)
    armed = Armed(
        order.number,
        settings.store_url.startswith("postgres"),
        lambda run, index: line.send(Fired(run, index)),
    )
    armed.arm(order.arming)
    queue.seed(order.arming.message_seed)
    clock.set_ahead(skew_of(order.arming, order.number))
    crash_points.arm(armed)
    listener = threading.Thread(target=line.listen, args=(armed, queue), daemon=True)
    listener.start()
    worker_ready.connect(lambda **_: line.send(Ready()), weak=False)
    try:
        run_worker(
            settings,
            order.kinds,
            order.verifier,
            (order.proposer,) if order.proposer else (),
            order.concurrency,
            fake_models=models_of(order) if order.engine == "stand-in" else None,
            wrap_enqueue=queue.wrap,
        )
    except (DeviceLostError, WorkerEndedError) as error:
        return error.exit_code
    return 0


def skew_of(arming: Arming, number: int) -> float:
    """How far a worker's clock is ahead, in seconds."""
    return arming.skews_sec[number] if number < len(arming.skews_sec) else 0.0


def models_of(order: Order) -> FakeModels:
    """The stand-in for the verifier, and one that guesses for the draft model."""

    def engines(model: ModelFolder, beside: ModelFolder | None) -> StandInHost:
        drafts = model.ref == order.proposer
        return StandInHost(
            model,
            beside,
            step_sec=order.step_sec,
            agreement=AGREEMENT if drafts else 1.0,
            numeric_class=order.numeric_class or NUMERIC_CLASS,
            taught_by=order.verifier if drafts else None,
        )

    return FakeModels(engines, stand_in_model.tokenizer)


def _write_to(log: Path) -> None:
    """Append standard output, standard error and log lines to a file."""
    with log.open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    logging.basicConfig(
        level=logging.WARNING,
        format=f"%(asctime)s {os.getpid()} %(levelname)s %(message)s",
        stream=sys.stderr,
        force=True,
    )
    logging.getLogger("specbatch").setLevel(logging.INFO)
