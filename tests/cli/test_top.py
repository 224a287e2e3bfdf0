"""`specbatch top` in a script and on a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from contracts.shorthand import claim, ingest
from ledger.builders import JOB

from specbatch.pipeline.ledger.sql.migrate import open_store

pytestmark = pytest.mark.pipeline  # starts processes


def busy_store(path: Path) -> str:
    """A job of three groups, one of which somebody holds."""
    url = f"sqlite:///{path}"
    store = open_store(url)
    ingest(store, groups=3)
    claim(store, 0)
    store.close()
    return url


def test_one_look_is_plain_text_or_json(cli: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("SPECBATCH_DATABASE_URL", busy_store(tmp_path / "top.db"))
    for flags in (("--once",), ()):  # without a terminal it is one look in any case
        shown = cli("top", *flags)
        assert shown.code == 0
        assert "1 job running, 0 queued" in shown.out
        assert JOB[:12] in shown.out
        assert "\x1b" not in shown.out
    told = cli("top", "--json").json
    verify = next(stage for stage in told["stages"] if stage["stage"] == "verify")
    assert (verify["ready"], verify["leased"]) == (2, 1)
    assert [job["job_id"] for job in told["jobs"]] == [JOB]


def test_ctrl_c_ends_the_live_view_cleanly(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    script = "from specbatch.jobs.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "top", "--interval", "0.2"],
        cwd=tmp_path,
        env={**os.environ, "SPECBATCH_DATABASE_URL": busy_store(tmp_path / "top.db"),
             "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
        stdin=theirs, stdout=theirs, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(theirs)
    try:
        seen = read_until(ours, b"queues", looks=3)
        process.send_signal(signal.SIGINT)
        read_until(ours, b"\x1b[?1049l", looks=1)  # the terminal is as it was
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(ours)
    assert JOB[:12].encode() in seen
    assert process.stderr is not None
    with process.stderr as said:
        assert said.read() == b""


def read_until(terminal: int, words: bytes, looks: int) -> bytes:
    """What a terminal shows until it has shown some words so often."""
    seen, until = b"", time.monotonic() + 60
    while seen.count(words) < looks:
        ready, _, _ = select.select([terminal], [], [], until - time.monotonic())
        assert ready, f"nothing more came after {seen[-500:]!r}"
        seen += os.read(terminal, 1 << 16)
    return seen
