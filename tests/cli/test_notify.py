"""Targets hear of a job's end, also when the sender is killed between sending and noting it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from support import forks
from support.webhooks import Receiver, receiving

SECRET = "whsec_c3BlY2JhdGNoIHRlc3Qgc2VjcmV0"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as server:
        yield server


@pytest.fixture
def targets(folder: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = folder / "notify.yaml"
    path.write_text(f"ops: {{url: {receiver.url}, secret: {SECRET}}}\n")
    monkeypatch.setenv("SPECBATCH_NOTIFY_FILE", str(path))
    return path


@pytest.mark.usefixtures("targets")
def test_a_local_job_tells_its_target_before_the_command_ends(
    cli: Any, job: Any, receiver: Receiver
) -> None:
    done = cli("submit-job", *job, "--local", "--notify", "ops", "--json")
    assert done.code == 0
    ((headers, body),) = receiver.got
    said = json.loads(body)
    assert (said["job_id"], said["type"], said["rows_done"]) == (done.json["job"], "job.done", 12)
    assert headers["webhook-signature"].startswith("v1,")
    assert "notification to ops, done: sent" in cli("show", done.json["job"]).out
    (kept,) = cli("show", done.json["job"], "--json").json["notifications"]
    assert kept["attempts"] == 1


@pytest.mark.pipeline  # starts a process
@pytest.mark.usefixtures("targets")
def test_a_sender_killed_before_it_notes_what_it_sent_leaves_it_to_the_next(
    cli: Any, job: Any, folder: Path, receiver: Receiver
) -> None:
    arrived, killed = threading.Event(), threading.Event()

    def before() -> None:
        arrived.set()
        killed.wait(120)

    receiver.before = before
    command = ("submit-job", *map(str, job), "--local", "--notify", "ops")
    with forks.open_memory() as said:
        running = forks.fork(*command, environment={}, cwd=folder, stdout=said, stderr=said)
        assert arrived.wait(120)
        running.kill()
        running.wait(120)
    killed.set()
    receiver.before = lambda: None
    assert cli("notify").out == "sent 0 notifications\n", "the dead sender has it for a minute"
    _a_minute_passes(folder)
    assert cli("notify").out == "sent 1 notification\n"
    assert cli("notify").out == "sent 0 notifications\n"
    first, second = (json.loads(body) for _, body in receiver.got)
    assert first == second
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    (kept,) = cli("show", first["job_id"], "--json").json["notifications"]
    assert (kept["attempts"], kept["error"]) == (2, None)


def _a_minute_passes(folder: Path) -> None:
    engine = create_engine(f"sqlite:///{folder}/specbatch-data/specbatch.db")
    with engine.begin() as connection:
        connection.execute(text("UPDATE notifications SET due_at = due_at - 61"))
    engine.dispose()


@pytest.mark.usefixtures("targets")
def test_a_target_that_the_file_lacks_is_refused(cli: Any, job: Any) -> None:
    done = cli("submit-job", *job, "--local", "--notify", "opps")
    assert done.code == 2
    assert "has no target 'opps'; it has ops" in done.err


def test_a_local_job_needs_the_file(cli: Any, job: Any) -> None:
    done = cli("submit-job", *job, "--local", "--notify", "ops")
    assert done.code == 2
    assert "SPECBATCH_NOTIFY_FILE is not set" in done.err
    assert "SPECBATCH_NOTIFY_FILE is not set" in cli("notify").err


@pytest.mark.usefixtures("targets")
def test_a_target_can_be_tried(cli: Any, receiver: Receiver) -> None:
    assert cli("notify", "--test", "ops").out == "target ops took the message\n"
    assert json.loads(receiver.got[0][1])["job_id"] == "test"
    receiver.answers = [403]
    refused = cli("notify", "--test", "ops")
    assert refused.code == 2
    assert "target ops: 127.0.0.1 refuses with HTTP status 403" in refused.err
    assert "it has ops" in cli("notify", "--test", "other").err
