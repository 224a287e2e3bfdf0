"""What a shell completes: asked as it asks, and in a bash that has loaded our script."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cli.test_light import ARROW, IMPORTED, SLOW, run
from cli.test_results import in_store
from ledger.builders import JOB

from specbatch.jobs.cli.main import SENTENCES
from support.workers import BIN


def completions(folder: Path, line: str, program: str = "specbatch") -> list[str]:
    """What bash would be told at the end of this line, of which a shell shows nothing else."""
    words = line.split(" ")
    variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), variable: "complete_bash"}
    done = subprocess.run(
        [str(BIN / program)],
        env=os.environ | asked, cwd=folder, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


pytestmark = pytest.mark.pipeline  # starts processes


def test_commands_and_options_are_completed(folder: Path) -> None:
    assert completions(folder, "specbatch ") == list(SENTENCES)
    assert completions(folder, "specbatch re") == ["results", "report", "retry", "review", "replay"]
    assert completions(folder, "specbatch results --h") == ["--head", "--help"]
    assert completions(folder, "specbatch worker ")[:2] == ["ingest", "propose"]
    assert completions(folder, "submit-job --tempe", "submit-job") == ["--temperature"]
    assert completions(folder, "specbatch submit-job --tempe") == ["--temperature"]


def test_jobs_are_completed_by_id_and_by_name(folder: Path) -> None:
    in_store(folder)
    assert completions(folder, "specbatch show ") == ["latest", JOB, "nightly"]
    assert completions(folder, f"specbatch diff {JOB} ni") == ["nightly"]
    assert completions(folder, "specbatch cost job0") == [JOB]
    (folder / "specbatch-data" / "specbatch.db").write_bytes(b"no database")
    assert completions(folder, "specbatch show ") == []
    shutil.rmtree(folder / "specbatch-data")
    assert completions(folder, "specbatch show ") == []
    assert not (folder / "specbatch-data").exists()


def test_a_server_is_not_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBATCH_DATABASE_URL", "postgresql://nobody@127.0.0.1:9/none")
    assert completions(folder, "specbatch show ") == []


def test_a_key_press_imports_nothing_slow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_SPECBATCH_COMPLETE", "complete_bash")
    for line in ("specbatch ", "specbatch submit-job --max"):
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
        program = IMPORTED.replace("import sys", "import sys; sys.argv[0] = 'specbatch'", 1)
        done = run(folder, program=program)
        assert done.returncode == 0, done.stderr
        (imported,) = [x for x in done.stdout.splitlines() if x.startswith("imported: ")]
        assert not (SLOW | ARROW) & set(imported.split()), line


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
