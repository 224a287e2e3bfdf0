"""The first hour of a new user, in a clean environment with a wheel and no checkout.

Install, demo, an own CSV with a template, a notebook with pandas, wrong inputs, Ctrl-C, resume,
report. Every step's output is looked at.
"""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.tree import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]  # installs a whole environment

NOTEBOOK_PACKAGES = ("pandas", "nbconvert", "ipykernel")
REVIEWS = (
    ("r1", "def area(width, height):", "5"),
    ("r2", "def mean(values):", "4"),
    ("r3", "def is_empty(path):", "1"),
)
MANY = 600  # prompts: enough for a Ctrl-C in the middle on any machine
CELLS = (
    "import pandas as pd\nimport specbatch",
    "frame = pd.read_csv('reviews.csv', index_col='id')",
    "done = specbatch.run(frame, model=MODEL, template='# rated {stars}\\n{body}', max_tokens=8)",
    "done[['body', 'text', 'finish_reason']]",
)


@dataclass(frozen=True, slots=True)
class Desk:
    """A user's environment and folder."""

    python: Path
    folder: Path
    verifier: str
    draft: str

    def command(self, *arguments: str) -> list[str]:
        return [str(self.python.parent / arguments[0]), *arguments[1:]]

    def run(self, *arguments: str, code: int = 0) -> str:
        """A command's whole output, after it ended as expected."""
        done = subprocess.run(
            self.command(*arguments), cwd=self.folder, env=clean_environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout
        return done.stdout


def clean_environment() -> dict[str, str]:
    """Nothing of the checkout's, nor of the test run's."""
    left_out = ("SPECBATCH_", "PYTHON", "VIRTUAL_ENV", "OMP_", "TRITON_", "OPENBLAS_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    if forced := os.environ.get("SPECBATCH_NATIVE_ISA"):
        kept["SPECBATCH_NATIVE_ISA"] = forced
    return kept | {"COLUMNS": "120"}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """specbatch from wheels, in an environment of its own."""
    home = tmp_path_factory.mktemp("first-hour")
    wheels, environment, folder = home / "wheels", home / "venv", home / "work"
    folder.mkdir()
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel"]
    for source in (ROOT, ROOT / "jobs" / "demo"):
        subprocess.run([*pip, "--no-deps", "--wheel-dir", str(wheels), str(source)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    wheel, demo = (next(wheels.glob(f"{name}-[0-9]*")) for name in ("specbatch", "specbatch_demo"))
    subprocess.run(
        [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install",
         "--no-compile", "-c", str(ROOT / "constraints.txt"),
         f"{wheel}[engine,report]", str(demo), *NOTEBOOK_PACKAGES],
        check=True, env=clean_environment(),
    )  # fmt: skip
    find = "import specbatch.jobs.demo as demo; print(demo.__path__[0] + '/models')"
    models = subprocess.run(
        [str(python), "-c", find], check=True, text=True, stdout=subprocess.PIPE, cwd=folder,
        env=clean_environment(),
    ).stdout.strip()  # fmt: skip
    with (folder / "reviews.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "body", "stars"), *REVIEWS])
    with (folder / "many.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("id", "body"), *((f"m{n}", f"def f{n}(x):") for n in range(MANY))]
        )
    return Desk(python, folder, f"{models}/verifier", f"{models}/draft")


def test_the_installation_tells_its_version_and_what_the_machine_can_do(desk: Desk) -> None:
    assert re.fullmatch(r"specbatch \d+\.\d+\.\d+\n", desk.run("specbatch", "--version"))
    doctor = desk.run("specbatch", "doctor")
    assert "kernels at" in doctor
    assert "✗" not in doctor


def test_the_demo_shows_two_runs_with_the_same_outputs(desk: Desk) -> None:
    shown = desk.run("specbatch", "demo", "--max-tokens", "16")
    assert "192 of 192 unchanged prompts have the same output in both runs" in shown
    assert "the ledger balances" in shown


def test_an_own_csv_with_a_template(desk: Desk) -> None:
    job = ("submit-job", "--input", "reviews.csv", "--template", "# {stars}\n{body}",
           "--verifier", desk.verifier, "--max-tokens", "8", "--output", "reviews-out")  # fmt: skip
    planned = desk.run(*job, "--dry-run")
    assert "# 5\\ndef area(width, height):" in planned
    assert not (desk.folder / "reviews-out").exists()
    done = desk.run(*job, "--local")
    assert "3 prompts" in done or "3/3 prompts" in done
    rows = desk.run("specbatch", "results", "latest", "--json").splitlines()
    assert [json.loads(row)["id"] for row in rows if row.startswith("{")] == ["r1", "r2", "r3"]


def test_pandas_in_a_notebook(desk: Desk) -> None:
    cells = [f"MODEL = {desk.verifier!r}", *CELLS]
    notebook = {
        "cells": [
            {"cell_type": "code", "id": f"c{n}", "metadata": {}, "execution_count": None,
             "outputs": [], "source": source}
            for n, source in enumerate(cells)
        ],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "", "language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }  # fmt: skip
    (desk.folder / "first.ipynb").write_text(json.dumps(notebook))
    desk.run("jupyter-nbconvert", "--to", "notebook", "--execute", "first.ipynb", "--inplace")
    last = json.loads((desk.folder / "first.ipynb").read_text())["cells"][-1]["outputs"][-1]
    shown = "".join(last["data"]["text/plain"])
    for row_id, body, _ in REVIEWS:
        assert row_id in shown
        assert body in shown
    assert "length" in shown or "stop" in shown


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--input", "review.csv"), "review.csv"),
        (("--template", "{bodi}"), "body"),
        (("--format", "parquet"), "Parquet"),
        (("--verifier", "./models/none"), "models/none"),
        (("--max-token", "8"), "--max-tokens"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_wrong_input_is_one_sentence_that_names_it(
    desk: Desk, change: tuple[str, str], said: str
) -> None:
    job = {"--input": "reviews.csv", "--template": "{body}", "--verifier": desk.verifier,
           "--output": "wrong-out"}  # fmt: skip
    flags = [part for pair in (job | dict([change])).items() for part in pair]
    told = desk.run("submit-job", "--local", *flags, code=2)
    assert said in told
    assert "Traceback" not in told
    assert not (desk.folder / "wrong-out").exists()


def test_ctrl_c_keeps_what_is_done_and_the_job_resumes(desk: Desk) -> None:
    def job(output: str) -> list[str]:
        return ["submit-job", "--local", "--input", "many.csv", "--prompt-column", "body",
                "--verifier", desk.verifier, "--proposer", desk.draft, "--max-tokens", "128",
                "--group-size", "16", "--output", output]  # fmt: skip

    running = subprocess.Popen(
        desk.command(*job("stopped-out")), cwd=desk.folder, env=clean_environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert running.stdout is not None
    lines = []
    for line in running.stdout:
        lines.append(line)
        if (done := re.search(r"(\d+)/\d+ prompts", line)) and 0 < int(done[1]) < MANY:
            running.send_signal(signal.SIGINT)
            break
    lines.extend(running.stdout)
    assert running.wait(120) == 130, "".join(lines)
    resume = re.search(r"specbatch retry (\S+) --local", "".join(lines))
    assert resume is not None, "".join(lines)
    assert "interrupted" in desk.run("specbatch", "jobs", "--state", "interrupted")
    desk.run(*resume[0].split())
    desk.run(*job("undisturbed-out"))
    compared = desk.run("specbatch", "diff", resume[1], "latest")
    assert f"{MANY}" in compared


def test_the_report_is_one_file(desk: Desk) -> None:
    desk.run("specbatch", "report", "latest", "--output", "report.html")
    page = (desk.folder / "report.html").read_text()
    assert "many.csv" in page or "def f" in page
    assert "<svg" in page
