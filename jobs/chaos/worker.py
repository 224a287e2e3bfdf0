"""A worker process for disturbances: the ordinary worker with armed crash points.

    python -m specbatch.jobs.chaos.worker DESCRIPTOR

`DESCRIPTOR` is an inherited end of a pipe. Its `Order` comes through it (so no password is among
the arguments), then an `Arming` per run. The worker reports each disturbance through it before the
disturbance fires, and ends when the other end closes.
"""

from __future__ import annotations

import contextlib
import logging
import os
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
from specbatch.jobs.chaos.unruly_queue import UnrulyQueue
from specbatch.pipeline.bootstrap import FakeModels
from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.runtime.client import Enqueue
from specbatch.schemas import crash_points
from specbatch.schemas.errors import DeviceLostError, WorkerEndedError
from specbatch.schemas.settings import Settings
from specbatch.workers.lifecycle import run_worker

AGREEMENT = 0.8  # of the stand-in's draft model


@dataclass(slots=True)
class Line:
    """This process's end of the pipe. Thread-safe."""

    connection: Connection
    number: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, event: Event) -> None:
        with self.lock, contextlib.suppress(OSError):  # the supervisor has ended
            self.connection.send(event)

    def listen(self, armed: Armed, queue: SeededQueue) -> None:
        """Take what comes until the other end is gone; then this process goes, too."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message: Arming | Ask = self.connection.recv()
                if isinstance(message, Ask):
                    self.tell(Busy(len(state.reserved_requests)))
                    continue
                armed.arm(message)
                queue.seed(message.message_seed)
                clock.set_ahead(skew_of(message, self.number))
                self.tell(IsArmed(message.run))
        os._exit(1)


class SeededQueue:
    """The unruly queue, once the worker has made it."""

    def __init__(self) -> None:
        self._queue: UnrulyQueue | None = None
        self._seed: int | None = None

    def seed(self, seed: int | None) -> None:
        self._seed = seed
        if self._queue is not None:
            self._queue.seed(seed)

    def wrap(self, enqueue: Enqueue) -> Enqueue:
        self._queue = UnrulyQueue(enqueue)
        self._queue.seed(self._seed)
        return self._queue


def work(order: Order, connection: Connection) -> int:
    """Run the worker until it is ended. Returns the exit code."""
    _write_to(Path(order.log))
    tempfile.tempdir = str(Path(order.log).parent)  # what a killed one leaves there goes with it
    if order.home:
        os.chdir(order.home)
    line, queue = Line(connection, order.number), SeededQueue()
    settings = Settings(**order.settings)
    armed = Armed(
        order.number,
        settings.store_url.startswith("postgres"),
        lambda run, index: line.tell(Fired(run, index)),
    )
    armed.arm(order.arming)
    queue.seed(order.arming.message_seed)
    clock.set_ahead(skew_of(order.arming, order.number))
    crash_points.arm(armed)
    listener = threading.Thread(target=line.listen, args=(armed, queue), daemon=True)
    listener.start()
    worker_ready.connect(lambda **_: line.tell(Ready()), weak=False)
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


def main(arguments: list[str]) -> int:
    """The entry point of the process."""
    connection: Connection = Connection(int(arguments[0]))
    order: Order = connection.recv()
    return work(order, connection)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
