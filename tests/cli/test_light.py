"""Submitting and following need neither torch nor pyarrow: proved where neither can be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
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


SLOW = {"torch", "transformers", "tokenizers", "safetensors", "sqlalchemy", "celery"}
ARROW = {"pyarrow", "numpy"}

IMPORTED = """
import sys
from specbatch.jobs.cli.main import main
try:
    main()
finally:
    print("imported:", *sys.modules)
"""


def run(
    folder: Path, *arguments: str, program: str = BLOCKED, **settings: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
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


def imported_by(folder: Path, *arguments: str, code: int, said: str) -> set[str]:
    """The modules that a command has imported when it ends with this code, having said this."""
    done = run(folder, *arguments, program=IMPORTED)
    assert done.returncode == code, done.stderr
    assert said in " ".join(f"{done.stdout} {done.stderr}".split())
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("imported: ")]
    return set(line.split()[1:])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "Turn prompts into verified"),
        (["--version"], 0, f"specbatch {version('specbatch')}"),
        (["job"], 2, "Did you mean 'jobs'?"),
        (["submit-job", "--help"], 0, "--prompt-column"),
    ],
)
def test_help_imports_nothing_slow(
    tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    assert not (SLOW | ARROW) & imported_by(tmp_path, *arguments, code=code, said=said)


WRONG = {
    "path": (["--input", "nope.parquet"], "nope.parquet does not exist"),
    "column": (["--prompt-column", "p"], "no column `p`"),
    "field": (["--input", "lines.jsonl", "--prompt-column", "p"], "no field `p`"),
    "template": (["--template", "{promt}"], "no column `promt` (did you mean `prompt`?)"),
    "template of fields": (
        ["--input", "lines.jsonl", "--template", "{promt}"],
        "no field `promt` (did you mean `prompt`?)",
    ),
    "jinja": (
        ["--input", "lines.jsonl", "--template", "{{ promt }}", "--template-kind", "jinja"],
        "no field `promt` (did you mean `prompt`?)",
    ),
    "cells": (["--input", "cells.csv", "--prompt-column", "p"], "no column `p`"),
    "format": (["--format", "xml"], "'xml'"),
    "model": (["--verifier", "./nowhere"], "nowhere` does not exist"),
    "no model": (["--verifier", "."], "has no config.json"),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for name in WRONG
        for mode in ("--local", "--dry-run", None)
        if mode or "model" not in name  # else workers have it
    ],
)
def test_a_slip_is_answered_before_anything_slow_is_imported(
    folder: Path, name: str, mode: str | None
) -> None:
    (folder / "lines.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "cells.csv").write_text("prompt\na\n")
    flags, said = WRONG[name]
    given = ["--input", "prompts.parquet", "--output", "out", "--verifier", "owner/model", *flags]
    arguments = ["submit-job", *given, *filter(None, [mode])]
    assert not SLOW & imported_by(folder, *arguments, code=2, said=said)


@pytest.mark.parametrize("name", ["field", "template of fields", "jinja"])
def test_a_slip_in_jsonl_needs_no_arrow(folder: Path, name: str) -> None:
    (folder / "lines.jsonl").write_text('{"prompt": "a"}\n')
    flags, said = WRONG[name]
    arguments = ["submit-job", *flags, "--output", "out", "--verifier", "owner/model"]
    imported = imported_by(folder, *arguments, code=2, said=said)
    assert not (SLOW | ARROW | {"jinja2"}) & imported


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
