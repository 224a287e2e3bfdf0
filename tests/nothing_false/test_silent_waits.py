"""Nobody waits without a word: not for a worker, not for a database, not for a broker."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from datetime import time as datetime_time
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbatch.pipeline.bootstrap import make_store
from specbatch.schemas.settings import Settings
from support import forks
from support.models import tiny_llama
from support.servers import PrivatePostgres, free_port
from support.workers import BIN, WAIT_SEC, WorkerProcess, wait_until, worker

TIMEOUT_SEC = 12.0
GRACE_SEC = 10.0  # for a process to start and end, on a machine that is busy
SOON_SEC = 2.0
SLOWER = 8  # times its start, on a machine that others begin to use meanwhile


class Place:
    """A folder with a model and prompts, a store and a broker, in which commands run."""

    def __init__(self, home: Path, redis_url: str, stack: ExitStack) -> None:
        self.home = home
        self.model = str(tiny_llama(home / "model", vocab_size=300, hidden=32, layers=2, heads=2))
        rows = {"prompt": [f"prompt number {i}" for i in range(8)]}
        pq.write_table(pa.table(rows), home / "prompts.parquet")
        self.environment = {
            "SPECBATCH_WORKSPACE": str(home / "specbatch-data"),
            "SPECBATCH_BROKER_URL": redis_url,
            "SPECBATCH_SWEEP_INTERVAL_SEC": "0.5",
            "SPECBATCH_LEASE_SEC": "3",
        }
        self._stack = stack

    def worker(self, *arguments: str, name: str = "", **settings: str) -> WorkerProcess:
        environment = self.environment | settings
        return self._stack.enter_context(
            worker(*arguments, environment=environment, cwd=self.home, name=name)
        )

    def job(self, output: str = "out") -> list[str]:
        return [
            *("submit-job", "--input", "prompts.parquet", "--output", output, "--group-size", "4"),
            *("--verifier", self.model, "--dtype", "float32", "--max-tokens", "4"),
        ]

    def run(self, *arguments: str, **settings: str) -> Any:
        return forks.run(
            *arguments,
            environment=self.environment | settings,
            cwd=self.home,
            timeout=WAIT_SEC,
        )

    def shown(self, *arguments: str) -> dict[str, Any]:
        done = self.run("specbatch", *arguments, "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))

    def processes(self) -> list[dict[str, Any]]:
        return list(self.shown("top")["processes"])


@pytest.fixture
def place(tmp_path: Path, redis_url: str) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(tmp_path, redis_url, stack)


def test_each_worker_that_a_job_lacks_is_named(place: Place) -> None:
    done = place.run(*place.job())
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip().splitlines()[-1]
    for words in (
        "waits for a worker that reads inputs (`specbatch worker ingest`, or `all`); alive: none",
        f"waits for a worker with model `{place.model}`; alive: none",
        "waits for a worker that records groups (`specbatch worker record`, or `all`)",
    ):
        assert words in done.stderr
        assert words in place.run("specbatch", "show", job).stdout
        assert words in " ".join(place.run("specbatch", "top", "--once").stdout.split())
        assert words in str(place.shown("show", job)["waits_for"])

    place.worker("ingest")
    wait_until("reading is no wait any more", lambda: "reads" not in waits(place, job))
    assert f"model `{place.model}`" in waits(place, job)

    place.worker("verify", "--verifier", place.model)
    wait_until("verifying is none", lambda: "with model" not in waits(place, job))
    wait_until("only recording is", lambda: "waits for a worker that records" in waits(place, job))

    place.worker("record")
    wait_until("it ends", lambda: place.shown("show", job)["state"] == "done")
    assert place.shown("show", job)["waits_for"] is None


def waits(place: Place, job: str) -> str:
    return str(place.shown("show", job)["waits_for"])


# --- servers that do not answer ---------------------------------------------------------------
@contextmanager
def deaf_port() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield int(listener.getsockname()[1])


class Spoken:
    """A command from the shell: when it said what, and when it ended."""

    def __init__(
        self,
        place: Place,
        *arguments: str,
        on_line: Callable[[str], None] = lambda _: None,
        **settings: str,
    ) -> None:
        self.lines: list[tuple[float, str]] = []
        process = subprocess.Popen(
            [str(BIN / arguments[0]), *arguments[1:]],
            env={"PATH": "/usr/bin:/bin", **place.environment, **settings},
            cwd=place.home,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun = time.monotonic()
        assert process.stderr is not None
        for line in process.stderr:
            self.lines.append((time.monotonic() - begun, line))
            on_line(line)
        self.code = process.wait(WAIT_SEC)
        self.took_sec = time.monotonic() - begun

    @property
    def text(self) -> str:
        return "".join(line for _, line in self.lines)

    def first(self, words: str) -> float:
        """Seconds until it said this."""
        return next(at for at, line in self.lines if words in line)


def start_sec(place: Place) -> float:
    """What a command takes to start here and now, for all that waits for no server."""
    begun = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", "import specbatch.jobs.cli.remote, specbatch.workers.app"],
        check=True,
        cwd=place.home,
    )
    return time.monotonic() - begun


def holds_to_its_timeout(place: Place, server: str, **settings: Any) -> None:
    """It says within two seconds that it waits, then ends in time with one sentence."""
    slow = SLOWER * start_sec(place)
    timeout = ("--wait", "--timeout", str(TIMEOUT_SEC))
    said = Spoken(place, *place.job(), *timeout, **settings)
    assert said.code in (4, 6), said.text
    assert f"{server}" in said.text
    assert "Traceback" not in said.text
    assert said.first("does not answer, trying again until") <= SOON_SEC + slow
    assert said.took_sec <= TIMEOUT_SEC + GRACE_SEC + slow
    assert said.text.count("error:") == 1


def test_a_database_where_nobody_listens(place: Place) -> None:
    url = f"postgresql+psycopg://nobody@127.0.0.1:{free_port()}/none"
    holds_to_its_timeout(place, "database", SPECBATCH_DATABASE_URL=url)


def test_a_database_that_never_answers(place: Place) -> None:
    with deaf_port() as port:
        url = f"postgresql+psycopg://nobody@127.0.0.1:{port}/none"
        holds_to_its_timeout(place, "database", SPECBATCH_DATABASE_URL=url)


def test_a_database_that_another_process_has_locked(place: Place) -> None:
    make_store(Settings(workspace=place.environment["SPECBATCH_WORKSPACE"])).close()
    file = Path(place.environment["SPECBATCH_WORKSPACE"]) / "specbatch.db"
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    try:
        holds_to_its_timeout(place, "database")
    finally:
        other.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_database_that_goes_away_while_a_command_waits(
    place: Place, own_postgres: PrivatePostgres, number: signal.Signals
) -> None:
    """It is in the pool by then: what the pool gives is no answer of the server."""
    gone_at: list[float] = []

    def go_away(line: str) -> None:
        if "waits for a worker" in line and not gone_at:
            wait_until("nothing is asked: a server that stops then works for ever", is_quiet)
            gone_at.append(time.monotonic())
            for pid in (int(str(own_postgres.pid)), *children(int(str(own_postgres.pid)))):
                with suppress(ProcessLookupError):  # of the session that looked
                    os.kill(pid, number)
        elif "does not answer, trying again until" in line:
            gone_at.append(time.monotonic())

    url = own_postgres.create_database()

    def is_quiet() -> bool:
        """Between two looks of the command, each of which asks several things."""
        with psycopg.connect(url.replace("+psycopg", "")) as connection:
            found = connection.execute(
                "SELECT bool_and(state = 'idle') AND clock_timestamp() - max(state_change) BETWEEN"
                " '50 ms' AND '250 ms' FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            return found.fetchone() == (True,)

    timeout = ("--wait", "--timeout", str(2 * TIMEOUT_SEC))  # a stall must not use it up
    said = Spoken(place, *place.job(), *timeout, on_line=go_away, SPECBATCH_DATABASE_URL=url)
    if number is signal.SIGSTOP:
        for pid in (int(str(own_postgres.pid)), *children(int(str(own_postgres.pid)))):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert len(gone_at) == 2, said.text
    assert gone_at[1] - gone_at[0] <= 2 * SOON_SEC  # it is asked twice a second
    assert said.code == 6, said.text
    ended = re.findall(r"did not answer until ([0-9:]+) UTC", said.text)
    assert len(ended) == 1, said.text
    now = datetime.now(UTC)
    at = datetime.combine(now.date(), datetime_time.fromisoformat(ended[0]), UTC)
    assert 0 <= (now - at).total_seconds() % 86400 <= GRACE_SEC, "the time is that of the end"
    assert said.text.count("error:") == 1


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_broker_that_never_answers(place: Place) -> None:
    with deaf_port() as port:
        url = f"redis://127.0.0.1:{port}/0"
        holds_to_its_timeout(place, "broker", SPECBATCH_BROKER_URL=url)


def test_a_broker_where_nobody_listens_is_told_of_at_once(place: Place) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    said = Spoken(place, *place.job(), SPECBATCH_BROKER_URL=url)
    assert said.code == 4, said.text
    assert "cannot be reached" in said.text
    assert said.took_sec <= TIMEOUT_SEC + GRACE_SEC
