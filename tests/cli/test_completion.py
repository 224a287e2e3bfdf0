"""What a shell completes: asked as it asks, and in a bash that has loaded our script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.test_light import ARROW, SLOW, in_one_process
from cli.test_results import in_store
from ledger.builders import JOB

from specbatch.jobs.cli import main, submit_job
from specbatch.jobs.cli.console import complete_variable, err
from specbatch.jobs.cli.main import SENTENCES
from support.workers import BIN

pytestmark = pytest.mark.pipeline  # starts processes

Complete = Callable[..., list[str]]


@pytest.fixture
def completions(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Complete:
    """What bash would be told at the end of this line, of which a shell shows nothing else."""
    assert folder.is_dir()
    monkeypatch.setattr(err, "quiet", False)  # as it is again after the test
    mains = {"specbatch": main.main, "submit-job": submit_job.main}

    def call(line: str, program: str = "specbatch") -> list[str]:
        words = line.split(" ")
        asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        with monkeypatch.context() as shell:
            for name, value in (asked | {complete_variable(program): "complete_bash"}).items():
                shell.setenv(name, value)
            shell.setattr(sys, "argv", [program])
            with pytest.raises(SystemExit) as left:
                mains[program]()
        told = capsys.readouterr()
        assert (left.value.code, told.err) == (0, "")
        return told.out.split()

    return call


def test_commands_and_options_are_completed(completions: Complete) -> None:
    assert completions("specbatch ") == list(SENTENCES)
    assert completions("specbatch re") == ["results", "report", "retry", "review", "replay"]
    assert completions("specbatch results --h") == ["--head", "--help"]
    assert completions("specbatch worker ")[:2] == ["ingest", "propose"]
    assert completions("submit-job --tempe", "submit-job") == ["--temperature"]
    assert completions("specbatch submit-job --tempe") == ["--temperature"]


def test_jobs_are_completed_by_id_and_by_name(completions: Complete, folder: Path) -> None:
    in_store(folder)
    assert completions("specbatch show ") == ["latest", JOB, "nightly"]
    assert completions(f"specbatch diff {JOB} ni") == ["nightly"]
    assert completions("specbatch cost job0") == [JOB]
    (folder / "specbatch-data" / "specbatch.db").write_bytes(b"no database")
    assert completions("specbatch show ") == []
    shutil.rmtree(folder / "specbatch-data")
    assert completions("specbatch show ") == []
    assert not (folder / "specbatch-data").exists()


def test_a_server_is_not_asked(completions: Complete, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBATCH_DATABASE_URL", "postgresql://nobody@127.0.0.1:9/none")
    assert completions("specbatch show ") == []


def test_a_key_press_imports_nothing_slow(folder: Path) -> None:
    lines = ("specbatch ", "specbatch submit-job --max")
    pressed = [
        {
            "_SPECBATCH_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(line.count(" ")),
        }
        for line in lines
    ]
    for ended in in_one_process(folder, [], [], environments=pressed):
        assert ended.code == 0, ended.said
        assert ended.said
        assert not (SLOW | ARROW) & ended.imported


def test_bash_loads_the_script_and_completes_with_it(folder: Path) -> None:
    script = """
    set -eu
    eval "$(specbatch completion bash)"
    complete -p specbatch submit-job
    COMP_WORDS=(specbatch resu) COMP_CWORD=1
    _specbatch_completion specbatch
    echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-c", script],
        env=os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"},
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "results"
    assert "_submit_job_completion submit-job" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_for_both_programs(cli: Any, shell: str) -> None:
    done = cli("completion", shell)
    assert done.code == 0
    for name in ("_SPECBATCH_COMPLETE", "_SUBMIT_JOB_COMPLETE"):
        assert f"{name}=complete_{shell}" in done.out
    if shutil.which(shell):  # the shell itself finds no fault in it
        checked = subprocess.run([shell, "-n"], input=done.out, text=True, check=False)
        assert checked.returncode == 0


def test_another_shell_is_refused(cli: Any) -> None:
    assert cli("completion", "tcsh").code == 2
