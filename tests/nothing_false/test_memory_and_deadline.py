"""A native call that never returns ends its worker, whether or not it holds the interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

import pytest

from specbatch.jobs.chaos.stand_in_model import write_model
from specbatch.pipeline.bootstrap import make_client, make_store
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.schemas.errors import DeviceLostError
from specbatch.schemas.records import DueWork, JobState
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import load_spec
from support import forks
from support.workers import wait_until

ROWS = 12
PATIENCE_SEC = 90
# A worker on the stand-in engine, of which a step may never end.
WORKER = """
import ctypes, sys
from specbatch.jobs.chaos import stand_in
from specbatch.jobs.chaos.stand_in_model import tokenizer
from specbatch.pipeline.bootstrap import FakeModels
from specbatch.schemas.settings import Settings
from specbatch.workers.lifecycle import run_worker

model, hangs = sys.argv[1:3]
step, steps = stand_in.StandInEngine.step, []

def hanging(self):
    steps.append(1)
    if hangs != "goes on" and len(steps) > 5:
        library = ctypes.PyDLL if hangs == "holds" else ctypes.CDLL
        while True:
            library(None).sleep(3600)
    return step(self)

stand_in.StandInEngine.step = hanging
models = FakeModels(lambda model, beside: stand_in.StandInHost(model, beside), tokenizer)
run_worker(Settings(), ("ingest", "verify", "record"), model, (), 4, fake_models=models)
"""


@pytest.mark.parametrize("how", ["holds", "lets go"])
def test_a_native_call_that_never_returns_ends_its_worker_and_costs_no_row(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    environment = {
        "SPECBATCH_BROKER_URL": redis_url,
        "SPECBATCH_WORKSPACE": str(tmp_path / "workspace"),
        "SPECBATCH_LEASE_SEC": "3",  # looks come with heartbeats, three to a lease
        "SPECBATCH_STEP_DEADLINE_SEC": "0.5",
        "SPECBATCH_SWEEP_INTERVAL_SEC": "0.3",
        "SPECBATCH_MESSAGE_PATIENCE_SEC": "1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    lines = [json.dumps({"id": f"r{i}", "prompt": f"prompt number {i}"}) for i in range(ROWS)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    model = str(write_model(tmp_path / "model"))
    spec = {
        "input": {"uri": "in.jsonl"},
        "output": {"uri": "out"},
        "verifier": model,
        "sampling": {"max_tokens": 64, "seed": 5, "ignore_eos": True},
        "group_size": 4,
    }
    store = make_store(Settings())
    client = make_client(Settings(), _silent, store)
    job_id = client.submit(load_spec(spec).resolved(tmp_path))[0].job_id

    with (tmp_path / "hung.log").open("wb") as log:
        hung = _start(model, how, tmp_path, log)
        try:
            code = hung.wait(PATIENCE_SEC)
        finally:
            hung.kill()
    told = (tmp_path / "hung.log").read_text()
    assert code == DeviceLostError.exit_code, told
    lease_sec = float(environment["SPECBATCH_LEASE_SEC"])
    after = {
        "holds": f"{0.5 + 2 * lease_sec:g} s (SPECBATCH_STEP_DEADLINE_SEC is 0.5; two leases",
    }.get(how, "0.5 s (SPECBATCH_STEP_DEADLINE_SEC)")
    assert f"a step of the engine has not ended for {after}" in told
    assert ("holds the interpreter" in told) == (how == "holds")
    assert not store.get_job(job_id).state.is_final
    with (tmp_path / "next.log").open("wb") as log:
        following = _start(model, "goes on", tmp_path, log)
        try:
            wait_until("its end", lambda: store.get_job(job_id).state.is_final)
        finally:
            following.terminate()
            following.wait(60)
    assert store.get_job(job_id).state is JobState.DONE
    table = read_output(str(tmp_path / "out"))
    assert table["id"].to_pylist() == [f"r{i}" for i in range(ROWS)]
    assert table["error"].null_count == ROWS
    store.close()


def _start(model: str, how: str, folder: Path, log: IO[bytes]) -> forks.Forked:
    command = ("-c", WORKER, model, how)
    return forks.fork(*command, environment={}, cwd=folder, stdout=log, stderr=log)


def _silent(_: DueWork) -> None:
    """The sweeper finds it."""
