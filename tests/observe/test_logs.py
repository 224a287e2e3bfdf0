"""Logs as JSON: ids of what a thread works on, nothing that masked text would not show."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specbatch.pipeline.observe.tracing.context import (
    CurrentWork,
    attempt_span_id,
    trace_id_of,
    work_on,
)
from specbatch.pipeline.observe.tracing.logs import JsonFormatter
from specbatch.schemas import masking
from specbatch.schemas.records import Lease, Stage
from support.in_thread import in_thread
from support.workers import BIN

JOB = "0123456789abcdef"
LEASE = Lease(JOB, 3, Stage.VERIFY, 7, "host:1", 2)


class Lines(logging.Handler):
    """Keeps what is logged, as it would be written."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    @property
    def last(self) -> dict[str, Any]:
        return dict(json.loads(self.lines[-1]))


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    logger = logging.getLogger("specbatch.tests.json")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


log = logging.getLogger("specbatch.tests.json")


def test_a_line_has_the_ids_of_its_attempt(lines: Lines) -> None:
    in_thread(lambda: work_on(CurrentWork.of(LEASE)), lambda: log.warning("%d rows", 3))
    line = lines.last
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "WARNING",
        "logger": "specbatch.tests.json",
        "message": "3 rows",
        "job": JOB,
        "stage": "verify",
        "group": 3,
        "generation": 7,
        "attempt": 2,
        "worker": "host:1",
        "trace_id": f"{trace_id_of(JOB):032x}",
        "span_id": f"{attempt_span_id(JOB, 3, 7):016x}",
    }


def test_before_its_claim_a_unit_has_no_span(lines: Lines) -> None:
    in_thread(lambda: work_on(CurrentWork(JOB, "verify", 3)), lambda: log.warning("busy"))
    assert "span_id" not in lines.last
    assert lines.last["trace_id"] == f"{trace_id_of(JOB):032x}"


def test_threads_have_ids_of_their_own(lines: Lines) -> None:
    both = threading.Barrier(2, timeout=30)

    def work(job: str) -> None:
        work_on(CurrentWork(job, "verify"))
        both.wait()
        log.warning("of %s", job)

    threads = [threading.Thread(target=work, args=(job,)) for job in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    found = [json.loads(line) for line in lines.lines]
    assert sorted((line["message"], line["job"]) for line in found) == [
        ("of one", "one"),
        ("of two", "two"),
    ]


def test_a_line_about_a_request_has_its_id_and_its_jobs(lines: Lines) -> None:
    request = f"{JOB}/5/0"
    said = {"request": request}
    in_thread(lambda: log.warning("refused", extra=said))  # as an engine's thread does
    assert lines.last["request"] == request
    assert lines.last["job"] == JOB
    assert lines.last["trace_id"] == f"{trace_id_of(JOB):032x}"
    assert "stage" not in lines.last
    in_thread(lambda: work_on(CurrentWork.of(LEASE)), lambda: log.warning("refused", extra=said))
    assert (lines.last["request"], lines.last["generation"]) == (request, 7)


def test_a_line_about_a_job_has_its_id_whoever_says_so(lines: Lines) -> None:
    in_thread(lambda: log.warning("job %s stops", JOB, extra={"job": JOB}))  # as a sweeper does
    assert (lines.last["job"], lines.last["trace_id"]) == (JOB, f"{trace_id_of(JOB):032x}")
    assert "request" not in lines.last


def test_nothing_is_known_of_threads_that_work_on_nothing(lines: Lines) -> None:
    in_thread(lambda: log.warning("hello"))
    assert set(lines.last) == {"time", "level", "logger", "message"}


def test_secrets_are_masked_wherever_they_stand(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masking, "_log_filters", [lambda text: text.replace("Anna", "[NAME]")])
    url = "redis://user:a-long-password@host"

    def fail() -> None:
        try:
            raise ValueError(f"no answer from {url} for Anna\nnor later")
        except ValueError:
            log.exception("Anna asked %s", url, stack_info=True)

    in_thread(fail)
    assert "a-long-password" not in lines.lines[-1]
    assert "Anna" not in lines.lines[-1]
    assert len(lines.lines[-1].splitlines()) == 1
    assert lines.last["error"] == "ValueError"
    assert "no answer from redis://user:***@host for [NAME]\nnor later" in lines.last["traceback"]


# --- commands -------------------------------------------------------------------------------------
def said_by(folder: Path, *arguments: str, **environment: str) -> tuple[int, str, list[str]]:
    done = subprocess.run(
        [str(BIN / "specbatch"), *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr.splitlines()


def test_a_command_complains_in_json_where_that_is_asked(tmp_path: Path) -> None:
    code, out, err = said_by(tmp_path, "show", "nosuchjob", SPECBATCH_LOG_FORMAT="json")
    (line,) = [json.loads(one) for one in err]
    assert (code, out) == (2, "")
    assert (line["level"], line["logger"]) == ("ERROR", "specbatch.cli")
    assert "nosuchjob" in line["message"]


def test_the_settings_file_may_ask_for_it_too(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('log_format = "json"\nbroker_url = "redis://:pw@x"\n')
    (tmp_path / "settings.toml").chmod(0o644)
    settings = {"SPECBATCH_SETTINGS": "settings.toml"}
    code, out, err = said_by(tmp_path, "settings", "--json", **settings)
    assert code == 0
    assert json.loads(out)["log_format"] == "json"
    (remark,) = [json.loads(one) for one in err]
    assert remark["level"] == "INFO"
    assert "holds a password and other users can read it" in remark["message"]


CRASHES = """
from specbatch.jobs.cli.console import new_app, run
app = new_app("")
@app.command()
def go():
    raise ValueError("redis://user:a-long-password@host")
run(app, "x")
"""


def test_a_bug_keeps_its_traceback_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASHES],
        cwd=tmp_path,
        env=os.environ | {"SPECBATCH_LOG_FORMAT": "json"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    (line,) = [json.loads(one) for one in done.stderr.splitlines()]
    assert (line["level"], line["error"]) == ("CRITICAL", "ValueError")
    assert "***" in line["traceback"]
    assert "a-long-password" not in done.stderr


LOADED = """
import sys
from specbatch.jobs.cli.main import main
try:
    main()
finally:
    found = [name for name in sys.modules if name.partition(".")[0] in ("opentelemetry", "google")]
    assert not found, found
"""


def test_commands_without_traces_import_none_of_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, "jobs"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
