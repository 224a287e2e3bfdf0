"""Environments of other schedulers, made on first use and kept in the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as Tree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.servers import PrivateRedis
from support.tree import ROOT

SETUP = ROOT / "tools" / "setup" / "dag-venvs"
INSIDE = Path(__file__).parent / "inside"
WAIT_SEC = 590.0  # below the limit of a test, so that what was said is shown


@dataclass(frozen=True)
class Inside:
    """What the tests of a file said that ran in another environment."""

    failures: dict[str, str]  # by test; empty: it passed
    log: str


RunInside = Callable[[str], Inside]


def environment(name: str) -> Path:
    """The interpreter of `.venv-NAME`."""
    made = subprocess.run(
        [str(SETUP), name],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return ROOT / f".venv-{name}" / "bin" / "python"


@pytest.fixture(scope="session")
def run_inside(tmp_path_factory: pytest.TempPathFactory) -> RunInside:
    """`run_inside("airflow")` runs `inside/in_airflow.py` in `.venv-airflow`, once."""
    done: dict[str, Inside] = {}

    def run(name: str) -> Inside:
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            with PrivateRedis() as redis:  # messages of two stores would be taken for each other's
                done[name] = _run(name, redis.url, folder)
        return done[name]

    return run


def _run(name: str, broker_url: str, folder: Path) -> Inside:
    results = folder / "results.xml"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    ran = subprocess.run(
        [
            *(str(environment(name)), "-m", "pytest", str(INSIDE / f"in_{name}.py")),
            *("-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(INSIDE)),
            *("--confcutdir", str(INSIDE)),  # the outer ones need the engine
            *("--basetemp", str(folder / "inside"), "--junitxml", str(results)),
        ],
        env=clean
        | {
            "PYTHONPATH": os.pathsep.join([str(ROOT / ".typing"), str(INSIDE)]),
            "SPECBATCH_BROKER_URL": broker_url,
            "SPECBATCH_TEST_PYTHON": sys.executable,
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WAIT_SEC,
        check=False,
    )
    log = ran.stdout + ran.stderr
    assert results.is_file(), log
    failures = {}
    for case in Tree.parse(results).iter("testcase"):
        wrong = [part.get("message", "") for part in case if part.tag in ("failure", "error")]
        failures[str(case.get("name"))] = "\n".join(wrong)
    return Inside(failures, log)
