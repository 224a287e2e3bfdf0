"""How a worker's consumer ends: asked to, twice, or by itself. In this process, on a broker in
memory."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.worker import state
from ledger.builders import JOB

from specbatch.pipeline.runtime.outage import Outage
from specbatch.schemas.errors import WorkerEndedError
from specbatch.schemas.records import NORMAL, DueWork, Stage
from specbatch.schemas.routing import queue_for
from specbatch.schemas.settings import Settings
from specbatch.workers.app import make_app, make_enqueue
from specbatch.workers.consumer import CheckedConsumer
from specbatch.workers.guard import WORK_TASK
from specbatch.workers.lifecycle import consume
from specbatch.workers.shutdown import GracefulShutdown, Restart

WAIT_SEC = 60.0


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What Celery changes of a process, changed back."""
    names = ("SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP", "SIGUSR1", "SIGUSR2")
    handlers = {name: signal.getsignal(getattr(signal, name)) for name in names}
    yield
    for name, handler in handlers.items():
        signal.signal(getattr(signal, name), handler)
    state.should_stop = state.should_terminate = None
    state.reset_state()


@pytest.fixture
def app() -> Celery:
    app = make_app(Settings(broker_url="memory://", workspace="unused"))
    app.conf.worker_consumer = CheckedConsumer
    return app


@pytest.mark.parametrize("error", [RuntimeError("a bug"), OSError(errno.EMFILE, "too many files")])
def test_a_worker_whose_consumer_dies_did_not_end_well(app: Celery, error: Exception) -> None:
    class Dying(CheckedConsumer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.loop = self.die

        def die(self, *_: Any) -> None:
            raise error

    app.conf.worker_consumer = Dying
    with pytest.raises(WorkerEndedError, match="its log says why") as raised:
        consume(app, [queue_for(Stage.RECORD, None, NORMAL)], concurrency=1)
    assert raised.value.exit_code == 7


@pytest.mark.parametrize("signals", [["SIGTERM"], ["SIGQUIT"], ["SIGINT", "SIGINT"]], ids="-".join)
def test_a_worker_ends_as_it_is_asked_to(app: Celery, signals: list[str]) -> None:
    """However patient it is: who asks twice, or for a cold end, has its groups given back."""
    begun, asked, stopped = threading.Event(), threading.Event(), threading.Event()
    ended: list[bool] = []

    @app.task(name=WORK_TASK, shared=False)  # type: ignore[untyped-decorator]  # celery has no types
    def work(**_: object) -> None:
        """A group in hand, which ends when its engine stops."""
        begun.set()
        ended.append((asked if signals == ["SIGTERM"] else stopped).wait(WAIT_SEC))

    class Asked(CheckedConsumer):
        """Between two waits for messages, the signals come."""

        def loop_args(self) -> tuple[Any, ...]:
            consumer, connection, *rest = super().loop_args()

            def drain_events(timeout: float) -> Any:
                if begun.is_set() and not asked.is_set():
                    for name in signals:
                        signal.raise_signal(getattr(signal, name))
                    asked.set()
                return connection.drain_events(timeout=timeout)

            return consumer, SimpleNamespace(drain_events=drain_events), *rest

    app.conf.worker_consumer = Asked
    model = "-".join(signals)  # a queue of its own: the broker in memory gives back what was left
    make_enqueue(app)(DueWork(JOB, Stage.VERIFY, 0, model))
    worker: Any = SimpleNamespace(engines=[SimpleNamespace(stop=stopped.set)], outage=Outage())
    with GracefulShutdown(worker, patience_sec=3600.0):
        consume(app, [queue_for(Stage.VERIFY, model, NORMAL)], concurrency=1)
    assert ended == [True]
    assert stopped.is_set() == (signals != ["SIGTERM"])


@pytest.mark.parametrize("signalled", [False, True])
def test_a_worker_that_must_start_anew_ends_as_on_sigterm_and_stays_ended_if_one_comes(
    app: Celery, signalled: bool
) -> None:
    begun, asked, stopped = threading.Event(), threading.Event(), threading.Event()

    @app.task(name=WORK_TASK, shared=False)  # type: ignore[untyped-decorator]  # celery has no types
    def work(**_: object) -> None:
        begun.set()
        assert stopped.wait(WAIT_SEC)

    class Asked(CheckedConsumer):
        def loop_args(self) -> tuple[Any, ...]:
            consumer, connection, *rest = super().loop_args()

            def drain_events(timeout: float) -> Any:
                if begun.is_set() and not asked.is_set():
                    restart()
                    if signalled:
                        signal.raise_signal(signal.SIGTERM)
                    asked.set()
                return connection.drain_events(timeout=timeout)

            return consumer, SimpleNamespace(drain_events=drain_events), *rest

    app.conf.worker_consumer = Asked
    model = f"anew-{signalled}"
    make_enqueue(app)(DueWork(JOB, Stage.VERIFY, 0, model))
    worker: Any = SimpleNamespace(engines=[SimpleNamespace(stop=stopped.set)], outage=Outage())
    with Restart() as restart, GracefulShutdown(worker, patience_sec=0.0):
        consume(app, [queue_for(Stage.VERIFY, model, NORMAL)], concurrency=1)
    assert stopped.is_set()
    assert not Restart().is_due
    assert restart.is_due == (not signalled)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
