"""Starts worker processes quickly, by forking a process that has imported everything.

Without it a worker that is killed a hundred times would spend its life importing. The forkserver
has one thread, no connection and no client, so its forks are as good as new processes. It is a
process of its own. It ends with the supervisor, and its workers end with it.

    python -m specbatch.jobs.chaos.forkserver DESCRIPTOR ENGINE
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import NoReturn

from specbatch.jobs.chaos.orders import EngineKind, Order
from specbatch.jobs.chaos.worker import work
from specbatch.pipeline.engines.vllm.core import warm_up

_ONE_THREAD = {  # a fork would not have the threads of libraries
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_WARM = (  # beside what this module imports
    "celery.app.control",
    "celery.concurrency.thread",
    "celery.worker.autoscale",
    "celery.worker.components",
    "celery.worker.strategy",
    "kombu.transport.redis",
    "pyarrow.parquet",
    "safetensors",
    "specbatch.pipeline.inputs.columnar",
    "specbatch.pipeline.ledger.sql.migrate",
    "specbatch.pipeline.runtime.knowledge_store",
    "specbatch.pipeline.runtime.switch_reader",
    "specbatch.pipeline.runtime.watchdog",
    "specbatch.pipeline.stages.dispatch",
    "specbatch.workers.redis_transport",
    "tokenizers",
)
_PR_SET_PDEATHSIG = 1  # of Linux' prctl


class ForkServer:
    """The supervisor's side. Thread-safe."""

    def __init__(self, engine: EngineKind) -> None:
        """`engine`: the engine of its workers."""
        self._connection, theirs = Pipe()
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "specbatch.jobs.chaos.forkserver"),
                    *(str(theirs.fileno()), engine),
                ],
                env={**os.environ, **_ONE_THREAD},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )

    def start(self, order: Order) -> tuple[int, Connection]:
        """(process id, our end of its pipe) of a new worker."""
        ours, theirs = Pipe()
        with theirs, self._lock:
            self._connection.send("start")
            send_handle(self._connection, theirs.fileno(), self._process.pid)
            pid: int = self._connection.recv()
        ours.send(order)
        return pid, ours

    def close(self) -> None:
        """End the forkserver and all its workers."""
        self._connection.close()
        self._process.wait()


def main(arguments: list[str]) -> int:
    """Fork a worker for each request, until the supervisor is gone."""
    _warm_up()
    if arguments[1] != "stand-in":
        _warm_up_models()
    if arguments[1] == "vllm":
        warm_up()
    gc.collect()
    gc.freeze()  # so that a fork's collections neither look at what was imported nor copy it
    connection: Connection = Connection(int(arguments[0]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit codes are not needed here
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.recv()
            handle = recv_handle(connection)
            pid = os.fork()
            if pid == 0:
                connection.close()
                _die_with_parent()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _be_a_worker(Connection(handle))
            os.close(handle)
            connection.send(pid)
    return 0


def _be_a_worker(line: Connection) -> NoReturn:
    """Run as a worker, and never return into the forkserver's loop."""
    code = 1
    try:
        code = work(line.recv(), line)
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _warm_up() -> None:
    """Import what a worker imports in its first minute."""
    for name in _WARM:
        import_module(name)


def _warm_up_models() -> tuple[object, ...]:
    """Import what a worker with models needs, which takes seconds. Touches no device."""
    import transformers

    from specbatch.pipeline.engines.exact import host

    return transformers, host


def _die_with_parent() -> None:
    """Let the kernel end this process with its parent, even when frozen."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
