"""Submitting and following need neither torch nor pyarrow: proved where neither can be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
from cli.conftest import write

from support.databases import migrated

pytestmark = pytest.mark.pipeline  # starts processes

HEAVY = {"torch", "pyarrow", "numpy", "transformers", "tokenizers", "safetensors", "triton"}
SLOW = {"torch", "transformers", "tokenizers", "safetensors", "sqlalchemy", "celery"}
ARROW = {"pyarrow", "numpy"}

COMMANDS = """
import contextlib, io, json, os, sys

commands, missing = map(json.loads, sys.argv[1:])
sys.modules |= dict.fromkeys(missing)  # as if they were not installed
from specbatch.jobs.cli.main import main

for environment, arguments in commands:
    os.environ.update(environment)
    sys.argv = ["specbatch", *arguments]
    code, said = 0, io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    imported = [name for name, module in sys.modules.items() if module is not None]
    print(json.dumps([code, said.getvalue(), imported]))
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended, and which modules had been imported by then."""

    code: int
    said: str
    imported: frozenset[str]


def in_one_process(
    folder: Path,
    *commands: Sequence[str],
    environments: Sequence[Mapping[str, str]] = (),
    missing: Collection[str] = (),
    **settings: str,
) -> list[Ended]:
    """Run commands one after another in a fresh process, which may not import what is missing.

    What the last of them has not imported, none has.
    """
    each = list(zip(environments or [{}] * len(commands), commands, strict=True))
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(each), json.dumps(sorted(missing))],
        cwd=folder,
        env=os.environ | {f"SPECBATCH_{k.upper()}": v for k, v in settings.items()},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = map(json.loads, done.stdout.splitlines())
    return [Ended(code, " ".join(said.split()), frozenset(names)) for code, said, names in told]


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


def test_help_and_a_slip_in_jsonl_need_nothing_slow_and_no_arrow(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('{"prompt": "a"}\n')
    expected = {
        ("--help",): (0, "Turn prompts into verified"),
        ("--version",): (0, f"specbatch {version('specbatch')}"),
        ("job",): (2, "Did you mean 'jobs'?"),
        ("submit-job", "--help"): (0, "--prompt-column"),
    }
    for name in ("field", "template of fields", "jinja"):
        flags, said = WRONG[name]
        expected["submit-job", *flags, "--output", "out", "--verifier", "owner/model"] = 2, said
    ended = in_one_process(tmp_path, *expected)
    for one, (arguments, (code, said)) in zip(ended, expected.items(), strict=True):
        assert (one.code, said in one.said) == (code, True), (arguments, one.said)
        assert not (SLOW | ARROW | {"jinja2"}) & one.imported, arguments


@pytest.fixture(scope="module")
def slips(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str | None], Ended]:
    """What was said to each of them, where."""
    folder = tmp_path_factory.mktemp("slips")
    migrated(folder / "specbatch-data" / "specbatch.db")
    write(folder / "prompts.parquet", ["a"])
    (folder / "lines.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "cells.csv").write_text("prompt\na\n")
    given = ["--input", "prompts.parquet", "--output", "out", "--verifier", "owner/model"]
    commands = [
        ["submit-job", *given, *WRONG[name][0], *filter(None, [mode])] for name, mode in SLIPS
    ]
    return dict(zip(SLIPS, in_one_process(folder, *commands), strict=True))


SLIPS = [
    (name, mode)
    for name in WRONG
    for mode in ("--local", "--dry-run", None)
    if mode or "model" not in name  # else workers have it
]


@pytest.mark.parametrize(("name", "mode"), SLIPS)
def test_a_slip_is_answered_before_anything_slow_is_imported(
    slips: dict[tuple[str, str | None], Ended], name: str, mode: str | None
) -> None:
    ended = slips[name, mode]
    assert ended.code == 2, ended.said
    assert WRONG[name][1] in ended.said
    assert not SLOW & ended.imported


def test_looking_and_following_a_job_need_no_engine_and_doing_one_says_what_to_install(
    folder: Path, redis_url: str
) -> None:
    flags = ["--input", "prompts.parquet", "--output", "out", "--verifier", "owner/model"]
    looking = [["--help"], ["submit-job", "--help"], ["jobs"], ["settings"]]
    done = in_one_process(
        folder,
        *looking,
        ["submit-job", *flags, "--name", "nightly"],
        *(["show", "nightly"], ["cancel", "nightly"], ["retry", "nightly"]),
        ["submit-job", "--local", *flags],
        ["export", "nightly", "--what", "costs", "--to", "c.parquet"],
        missing=HEAVY,
        broker_url=redis_url,
    )
    assert not HEAVY & done[-1].imported
    *well, retried, local, export = done
    assert all(one.code == 0 for one in well), well
    assert retried.code == local.code == export.code == 2
    assert "is still queued" in retried.said  # the cancel is not through: there is no worker
    assert "pip install 'specbatch[engine]'" in local.said
    assert "exports are Parquet and need pyarrow and numpy" in export.said
    assert "pip install 'specbatch[engine]'" in export.said
