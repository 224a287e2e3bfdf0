"""The process beside the engine's: it reads inputs, records groups and publishes.

`specbatch worker all` starts one. In the engine's own process that work would take turns with the
engine at the interpreter's lock, and cores away from its native threads. Here it has a lock of its
own and a lower priority, so it runs where the engine leaves a core free. To everybody else it is
one more worker: it claims by the store, and may die at any time.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading

from specbatch.jobs.cli.child_process import ChildProcess, end_with_parent
from specbatch.schemas.errors import SpecbatchError, UsageError
from specbatch.schemas.settings import Settings

log = logging.getLogger(__name__)

KINDS = ("ingest", "record")  # what needs no engine
NICENESS = 5
END_SEC = 15.0  # a little more than tasks have to end


def with_next_port(settings: Settings) -> Settings:
    """The settings, with the port above for metrics: each process serves one of its own.

    Raises `UsageError` unless it is free.
    """
    if not settings.metrics_port:
        return settings
    address, port = settings.metrics_address, settings.metrics_port + 1
    try:
        family, *_, resolved = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
        socket.create_server((str(resolved[0]), port), family=family).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"metrics of the second process cannot be served on {address}:{port} ({reason}): "
            "`specbatch worker all` takes SPECBATCH_METRICS_PORT and the port above it"
        ) from None
    return settings.model_copy(update={"metrics_port": port})


class SecondProcess(ChildProcess):
    """Raises `UsageError` when it could not serve its metrics.

    What it cannot end in time goes to others when its leases run out.
    """

    def __init__(self, settings: Settings, concurrency: int) -> None:
        level = str(log.getEffectiveLevel())
        settings = with_next_port(settings)
        arguments = [__name__, str(concurrency), level]
        super().__init__(arguments, settings, "the process that records", END_SEC)


def main() -> None:
    """The process itself: settings come on the first line of stdin, whose end is its end."""
    from specbatch.jobs.cli.console import begin_process, complain, log_as
    from specbatch.workers.lifecycle import run_worker

    settings = Settings.model_validate_json(sys.stdin.buffer.readline())
    begin_process()
    log_as(settings.log_format)
    for name in ("celery", "specbatch"):
        logging.getLogger(name).setLevel(int(sys.argv[2]))
    os.nice(NICENESS)
    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    try:
        run_worker(settings, KINDS, None, (), int(sys.argv[1]))
    except SpecbatchError as error:
        complain(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
