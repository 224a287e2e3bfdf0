"""The process beside a command: it is there again, whatever ended it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from typing import Any

import pytest

from specbatch.jobs.cli.child_process import ChildProcess
from specbatch.schemas.settings import Settings
from support.workers import wait_until

pytestmark = pytest.mark.pipeline  # starts processes


def test_a_process_that_cannot_be_started_at_once_is_started_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = ChildProcess(["json.tool"], Settings(), "the helper", end_sec=60.0)  # reads stdin
    starts, refused = subprocess.Popen, []

    def popen(*args: Any, **options: Any) -> Any:
        if len(refused) < 2:
            refused.append(args)
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return starts(*args, **options)

    killed = one.pid
    monkeypatch.setattr("specbatch.jobs.cli.child_process.RESTART_SEC", 0.01)
    monkeypatch.setattr(subprocess, "Popen", popen)
    os.kill(killed, signal.SIGKILL)
    wait_until("another runs", lambda: one.pid != killed)
    one.close()
    assert len(refused) == 2
    assert caplog.text.count("the helper cannot be started now; will retry") == 2
