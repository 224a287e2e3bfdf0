"""A worker whose device is gone gives its groups back and ends; another one finishes the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import create_engine, text

from specbatch.pipeline.outputs.outputs import read_output
from support import forks
from support.models import tiny_llama
from support.workers import WAIT_SEC, worker

ROWS, GROUPS = 16, 4
JOB = (
    *("submit-job", "--input", "prompts.parquet", "--group-size", str(ROWS // GROUPS)),
    *("--max-tokens", "24", "--temperature", "0.8", "--seed", "7", "--idempotency-key", "k"),
)
MESSAGE = "engine step failed: CUDA error: some words"
# `specbatch`, on a device that is lost in its fourth call, of one pass or several.
LOSING = """
import sys, torch
from specbatch.jobs.cli.main import main
from specbatch.kernels.decoder import cpu

arguments, calls = cpu.Decoder.arguments, []

def lose(self, *given):
    calls.append(1)
    if len(calls) >= 4:
        error = torch.AcceleratorError("CUDA error: some words")
        error.error_code = int(CODE)
        raise error
    return arguments(self, *given)

cpu.Decoder.arguments = lose
sys.argv[0] = "specbatch"
main()
"""


def specbatch(*arguments: str, environment: dict[str, str], cwd: Path) -> None:
    """A command to its end, which is a good one."""
    done = forks.run(*("specbatch", *arguments), environment=environment, cwd=cwd, timeout=WAIT_SEC)
    assert done.returncode == 0, done.stderr[-3000:]


def undisturbed(models: tuple[str, ...], cwd: Path) -> pa.Table:
    """The job on a device that nothing happens to."""
    plain = {"SPECBATCH_WORKSPACE": str(cwd / "plain-workspace")}
    specbatch(*JOB, *models, "--output", "plain", "--local", environment=plain, cwd=cwd)
    return read_output(str(cwd / "plain"))


def test_the_groups_of_a_lost_device_are_given_back_and_done_by_another_worker(
    redis_url: str, tmp_path: Path
) -> None:
    """Twice: nothing that it held is at fault, and of a kernel that failed one group might be."""
    prompts = pa.table({"prompt": [f"prompt number {row}" for row in range(ROWS)]})
    pq.write_table(prompts, tmp_path / "prompts.parquet")
    model = tiny_llama(tmp_path / "model", vocab_size=300, hidden=64, heads=2)  # for cpu.Decoder
    models = ("--verifier", str(model), "--proposer", "none")
    environment = {
        "SPECBATCH_BROKER_URL": redis_url,
        "SPECBATCH_WORKSPACE": str(tmp_path / "workspace"),
        "SPECBATCH_SWEEP_INTERVAL_SEC": "0.5",
    }
    job = (*JOB, *models, "--output", "out")
    specbatch(*job, environment=environment, cwd=tmp_path)

    before = [0] * GROUPS
    device, kernel = 214, 719  # CUDA's codes for what failed
    for kind, code, attempts in (("all", device, 0), ("verify", kernel, 1)):
        lost = forks.run(
            *("-c", LOSING.replace("CODE", str(code)), "worker", kind, *models),
            environment=environment,
            cwd=tmp_path,
            timeout=WAIT_SEC,
        )
        assert lost.returncode == 7, lost.stderr[-3000:]
        assert lost.stderr.strip().endswith(f"error: {MESSAGE}")
        groups = groups_of(tmp_path / "workspace" / "specbatch.db")
        assert {(g["stage"], g["lease_until"]) for g in groups} == {("verify", 0.0)}
        tokens = [g["generation"] for g in groups]
        held = [g for g, old, new in zip(groups, before, tokens, strict=True) if new > old]
        assert held, "it held some of them"
        # A group that was claimed after the loss did not cause it.
        assert attempts in {g["attempts"] for g in held} <= {0, attempts}
        assert {g["last_error"] for g in held} == {MESSAGE}
        before = tokens

    with (
        worker("record", environment=environment, cwd=tmp_path),
        worker("verify", *models, environment=environment, cwd=tmp_path),
    ):
        specbatch(*job, "--wait", environment=environment, cwd=tmp_path)
    got, expected = read_output(str(tmp_path / "out")), undisturbed(models, tmp_path)
    for column in ("id", "token_ids", "text", "finish_reason", "seed"):
        assert got[column].to_pylist() == expected[column].to_pylist()


def groups_of(database: Path) -> list[dict[str, Any]]:
    """The store's own rows."""
    engine = create_engine(f"sqlite:///{database}")
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT * FROM groups ORDER BY group_index")).mappings()
        found = [dict(row) for row in rows]
    engine.dispose()
    assert len(found) == GROUPS
    return found
