"""Submitting and following need neither torch nor pyarrow: proved where neither can be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pipeline  # starts processes

BLOCKED = """
import sys
heavy = {"torch", "pyarrow", "numpy", "transformers", "tokenizers", "safetensors", "triton"}

sys.modules |= dict.fromkeys(heavy)  # as if they were not installed
from specbatch.jobs.cli.main import main
try:
    main()
finally:
    assert not any(sys.modules[name] for name in heavy)
"""


def run(folder: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, *arguments],
        cwd=folder,
        env=os.environ | {f"SPECBATCH_{k.upper()}": v for k, v in settings.items()},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments", [["--help"], ["submit-job", "--help"], ["jobs"], ["settings"]]
)
def test_looking_needs_no_engine(folder: Path, arguments: list[str]) -> None:
    done = run(folder, *arguments)
    assert done.returncode == 0, done.stderr


def test_a_job_is_submitted_shown_cancelled_and_retried_without_engine(
    folder: Path, redis_url: str
) -> None:
    flags = ["--input", "prompts.parquet", "--output", "out", "--verifier", "owner/model"]
    submitted = run(folder, "submit-job", *flags, broker_url=redis_url)
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    for command in ("show", "cancel"):
        done = run(folder, command, job, broker_url=redis_url)
        assert done.returncode == 0, done.stderr
    retried = run(folder, "retry", job, broker_url=redis_url)
    assert retried.returncode == 2  # the cancel is not through: there is no worker
    assert "is still queued" in retried.stderr


def test_doing_a_job_here_says_what_to_install(folder: Path) -> None:
    flags = ["--input", "prompts.parquet", "--output", "out", "--verifier", "owner/model"]
    done = run(folder, "submit-job", "--local", *flags)
    assert done.returncode == 2
    assert "pip install 'specbatch[engine]'" in done.stderr


def test_an_export_says_what_is_missing(folder: Path) -> None:
    done = run(folder, "export", "some-job", "--what", "costs", "--to", "c.parquet")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "exports are Parquet and need pyarrow and numpy" in line
    assert "pip install 'specbatch[engine]'" in line
