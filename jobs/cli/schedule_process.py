"""The processes in which a scheduler runs what is no job: one for each attempt.

They end with the scheduler, however it ends; the next one runs the time again.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field

import orjson

from specbatch.jobs.cli.child_process import end_with_parent
from specbatch.jobs.schedules.attempt import Attempt, carry_out
from specbatch.schemas.errors import SpecbatchError
from specbatch.schemas.schedules import RunState, ScheduleRun
from specbatch.schemas.settings import Settings

END_SEC = 10.0  # to give a time back


@dataclass(slots=True)
class Processes:
    """Starts attempts, each in a process of its own."""

    settings: Settings
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def pids(self) -> list[int]:
        return [one.pid for one in self._running]

    def start(self, attempt: Attempt) -> None:
        self._running = [one for one in self._running if one.poll() is None]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],  # no modules of the current folder
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the scheduler's to answer
        )
        self._running.append(process)
        assert process.stdin is not None
        # Passwords among them, so neither in the arguments nor in a file.
        said = {"settings": self.settings.model_dump(mode="json"), "attempt": asdict(attempt)}
        with suppress(BrokenPipeError):  # it has ended already: its lease will say so
            process.stdin.write(orjson.dumps(said) + b"\n")
            process.stdin.flush()

    def close(self) -> None:
        """End them; what they do not give back in time is run again when its lease is over."""
        for one in self._running:
            assert one.stdin is not None
            with suppress(BrokenPipeError):
                one.stdin.close()
        for one in self._running:
            try:
                one.wait(END_SEC)
            except subprocess.TimeoutExpired:
                one.kill()


def main() -> None:
    """One attempt: what it is comes on the first line of stdin, whose end is its end."""
    from specbatch.jobs.cli.console import begin_process, complain, log_as
    from specbatch.pipeline.bootstrap import make_store

    said = orjson.loads(sys.stdin.buffer.readline())
    settings = Settings.model_validate(said["settings"])
    run = said["attempt"].pop("run")
    attempt = Attempt(ScheduleRun(**{**run, "state": RunState(run["state"])}), **said["attempt"])
    begin_process()
    log_as(settings.log_format)
    logging.getLogger("specbatch").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    try:
        with closing(make_store(settings)) as store:
            carry_out(settings, store, attempt)
    except KeyboardInterrupt:
        sys.exit(1)
    except SpecbatchError as error:
        complain(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
