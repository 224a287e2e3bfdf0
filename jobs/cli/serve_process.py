"""The process beside `specbatch serve`: it does the jobs of batches, one at a time.

In the service's own process the engine would take turns with requests at the interpreter's lock,
and a crash of one would be the end of the other.
"""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import closing
from pathlib import Path

from specbatch.jobs.cli.child_process import ChildProcess, end_with_parent
from specbatch.schemas.errors import SpecbatchError
from specbatch.schemas.settings import Settings

END_SEC = 30.0  # for the current step, and to give groups back


class RunnerProcess(ChildProcess):
    """What it cannot end in time is resumed after the next start."""

    def __init__(self, settings: Settings) -> None:
        super().__init__([__name__], settings, "the runner", END_SEC)


def main() -> None:
    """The process itself. The folder of the service is its workspace."""
    from specbatch.jobs.cli.connect import silent
    from specbatch.jobs.cli.console import INTERRUPTED, begin_process, complain, log_as
    from specbatch.jobs.serve.file_store import FileStore
    from specbatch.jobs.serve.locks import only_one
    from specbatch.jobs.serve.runner import Runner
    from specbatch.pipeline.bootstrap import make_client, make_store

    settings = Settings.model_validate_json(sys.stdin.buffer.readline())
    begin_process()
    log_as(settings.log_format)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    folder = Path(settings.workspace)
    try:
        # The runner of a service that was killed ends its step first.
        only_runner = only_one(folder / "runner.lock", busy=None)
        with only_runner, closing(make_store(settings)) as store:
            client = make_client(settings, silent, store)
            runner = Runner(settings, store, client, FileStore(folder).service_id)
            runner.take_sigterm()
            runner.run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SpecbatchError as error:
        complain(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
