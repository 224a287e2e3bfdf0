"""Starts worker processes, and soon: each is forked from one that has imported everything.

A worker that is killed a hundred times would otherwise spend its life importing. The nursery has
one thread, no connection and no client, so what it forks is as good as new. It is a process of its
own, which ends with the supervisor's, and its workers with it.

    python -m specbatch.jobs.chaos.forkserver DESCRIPTOR ENGINE
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import NoReturn

from specbatch.jobs.chaos.orders import EngineKind, Order
from specbatch.jobs.chaos.worker import work

_ONE_THREAD = {  # a library's threads would not come along
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_PR_SET_PDEATHSIG = 1  # of Linux' prctl


class ForkServer:
    """The supervisor's side. One thread at a time."""

    def __init__(self, engine: EngineKind) -> None:
        """`engine`: what its workers will have."""
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "specbatch.jobs.chaos.forkserver"),
                    *(str(theirs.fileno()), engine),
                ],
                env={**os.environ, **_ONE_THREAD},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )

    def start(self, order: Order) -> tuple[int, Connection]:
        """(process id, our end of its pipe) of a new worker."""
        ours, theirs = Pipe()
        with theirs:
            self._connection.send("start")
            send_handle(self._connection, theirs.fileno(), self._process.pid)
            pid: int = self._connection.recv()
        ours.send(order)
        return pid, ours

    def close(self) -> None:
        """End it, and whatever workers it still has."""
        self._connection.close()
        self._process.wait()


def main(arguments: list[str]) -> int:
    """Fork a worker for each wish, until the supervisor is gone."""
    _warm_up()
    if arguments[1] == "real":
        _warm_up_models()
    connection: Connection = Connection(int(arguments[0]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here asks how they ended
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
    """Never back into the nursery's loop."""
    code = 1
    try:
        code = work(line.recv(), line)
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _warm_up() -> tuple[object, ...]:
    """What a worker imports in its first minute."""
    import kombu.transport.redis
    import pyarrow.parquet
    import tokenizers
    from celery.concurrency import thread
    from celery.worker import WorkController

    from specbatch.pipeline.inputs import parquet
    from specbatch.pipeline.ledger.sql import migrate

    libraries = (kombu, pyarrow, tokenizers, thread, WorkController)
    return (*libraries, parquet, migrate)


def _warm_up_models() -> tuple[object, ...]:
    """What one of models imports besides, seconds long. No device is touched by that."""
    import transformers

    from specbatch.pipeline.engines.exact import host

    return transformers, host


def _die_with_parent() -> None:
    """Also when frozen: nothing else ends such a process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
