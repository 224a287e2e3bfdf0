"""A worker whose device is gone gives its groups back and ends; another one finishes the job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from sqlalchemy import create_engine, text

from specbatch.pipeline.outputs.outputs import read_output
from support import demo, forks
from support.workers import worker

WAIT_SEC = 240
MODELS = ("--verifier", str(demo.VERIFIER), "--proposer", "none")
JOB = (
    *("submit-job", "--input", str(demo.PROMPTS), *MODELS, "--group-size", "64"),
    *("--max-tokens", "24", "--temperature", "0.8", "--seed", "7", "--idempotency-key", "k"),
)
MESSAGE = "engine step failed: CUDA error: some words"
# `specbatch`, on a device that is lost in its tenth pass.
LOSING = """
import sys, torch
from specbatch.jobs.cli.main import main
from specbatch.kernels.decoder import cpu

forward, passes = cpu.Decoder.forward, []

def lose(self, batch):
    passes.append(1)
    if len(passes) >= 10:
        error = torch.AcceleratorError("CUDA error: some words")
        error.error_code = int(CODE)
        raise error
    return forward(self, batch)

cpu.Decoder.forward = lose
sys.argv[0] = "specbatch"
main()
"""


def specbatch(*arguments: str, environment: dict[str, str], cwd: Path) -> None:
    """A command to its end, which is a good one."""
    done = forks.run(*("specbatch", *arguments), environment=environment, cwd=cwd, timeout=WAIT_SEC)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """The job on a device that nothing happens to."""
    home = tmp_path_factory.mktemp("plain")
    plain = {"SPECBATCH_WORKSPACE": str(home / "workspace")}
    specbatch(*JOB, "--output", "plain", "--local", environment=plain, cwd=home)
    return read_output(str(home / "plain"))


@pytest.mark.parametrize(
    ("code", "attempts"), [(214, 0), (719, 1)], ids=["the-device-failed", "a-kernel-failed"]
)
def test_the_groups_of_a_lost_device_are_given_back_and_done_by_another_worker(
    redis_url: str, tmp_path: Path, expected: pa.Table, code: int, attempts: int
) -> None:
    environment = {
        "SPECBATCH_BROKER_URL": redis_url,
        "SPECBATCH_WORKSPACE": str(tmp_path / "workspace"),
        "SPECBATCH_SWEEP_INTERVAL_SEC": "0.5",
    }
    specbatch(*JOB, "--output", "out", environment=environment, cwd=tmp_path)

    lost = subprocess.run(
        [sys.executable, "-c", LOSING.replace("CODE", str(code)), "worker", "all", *MODELS],
        env=os.environ | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WAIT_SEC,
    )
    assert lost.returncode == 7, lost.stderr[-3000:]
    assert lost.stderr.strip().endswith(f"error: {MESSAGE}")
    groups = groups_of(tmp_path / "workspace" / "specbatch.db")
    assert {(g["stage"], g["lease_until"]) for g in groups} == {("verify", 0.0)}
    held = [g for g in groups if g["generation"] > 0]
    assert held, "it held some of them"
    assert {g["attempts"] for g in held} == {attempts}
    assert {g["last_error"] for g in held} == {MESSAGE}

    with worker("all", *MODELS, environment=environment, cwd=tmp_path) as another:
        specbatch(*JOB, "--output", "out", "--wait", environment=environment, cwd=tmp_path)
        another.end()
    got = read_output(str(tmp_path / "out"))
    for column in ("id", "token_ids", "text", "finish_reason", "seed"):
        assert got[column].to_pylist() == expected[column].to_pylist()


def groups_of(database: Path) -> list[dict[str, object]]:
    """The store's own rows."""
    engine = create_engine(f"sqlite:///{database}")
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT * FROM groups ORDER BY group_index")).mappings()
        found = [dict(row) for row in rows]
    engine.dispose()
    assert len(found) == 4
    return found
