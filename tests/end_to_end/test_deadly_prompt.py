"""A prompt that kills the process that verifies it, with all that this holds, each time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specbatch.jobs.chaos.stand_in_model import write_model
from specbatch.pipeline.bootstrap import make_client, make_store
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.schemas.records import DueWork, JobState
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import load_spec
from support import forks
from support.workers import wait_until

ROWS, DEADLY = 40, 13
MOST_LIVES = 40
# A worker of eight tasks at a time on the stand-in engine, which the prompt ends at once.
WORKER = """
import os, sys
from specbatch.jobs.chaos.stand_in import StandInHost
from specbatch.jobs.chaos.stand_in_model import tokenizer
from specbatch.pipeline.bootstrap import FakeModels
from specbatch.pipeline.engines import service
from specbatch.schemas.settings import Settings
from specbatch.workers.lifecycle import run_worker

model, deadly = sys.argv[1], tuple(sys.argv[2].encode())
submit = service.EngineService.submit

def submit_or_die(self, job_id, requests, priors=()):
    ticket = submit(self, job_id, requests, priors)
    if deadly and deadly in {request.prompt_ids for request in requests}:
        os._exit(9)
    return ticket

service.EngineService.submit = submit_or_die
hosts = lambda model, beside: StandInHost(model, beside, step_sec=0.02)
models = FakeModels(engines=hosts, tokenizer=tokenizer)
run_worker(Settings(), ("ingest", "verify", "record"), model, (), 8, fake_models=models)
"""


@pytest.mark.long
def test_of_five_groups_in_one_process_only_the_deadly_row_is_lost(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {
        "SPECBATCH_BROKER_URL": redis_url,
        "SPECBATCH_WORKSPACE": str(tmp_path / "workspace"),
        "SPECBATCH_LEASE_SEC": "2",
        "SPECBATCH_SWEEP_INTERVAL_SEC": "0.3",
        "SPECBATCH_MESSAGE_PATIENCE_SEC": "1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    prompts = [f"prompt number {i}" for i in range(ROWS)]
    lines = [json.dumps({"id": f"r{i}", "prompt": prompt}) for i, prompt in enumerate(prompts)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    model = str(write_model(tmp_path / "model"))
    spec = {
        "input": {"uri": "in.jsonl"},
        "output": {"uri": "out"},
        "verifier": model,
        "sampling": {"max_tokens": 64, "seed": 5, "ignore_eos": True},
        "group_size": 8,
    }
    store = make_store(Settings())
    client = make_client(Settings(), _silent, store)
    job_id = client.submit(load_spec(spec).resolved(tmp_path))[0].job_id

    def live(deadly: str) -> int:
        """A worker's life, until it dies or the job has ended; its exit code."""
        log = (tmp_path / "worker.log").open("ab")
        command = ("-c", WORKER, model, deadly)
        process = forks.fork(*command, environment={}, cwd=tmp_path, stdout=log, stderr=log)
        try:
            wait_until("an end", lambda: process.poll() is not None or ended())
        finally:
            process.terminate()
            process.wait(60)
            log.close()
        return process.wait()

    def ended() -> bool:
        return store.get_job(job_id).state.is_final

    lives = 0
    while not ended():
        lives += 1
        assert lives < MOST_LIVES, (tmp_path / "worker.log").read_text()[-3000:]
        live(prompts[DEADLY])
    assert store.get_job(job_id).state is JobState.PARTIAL
    errors = read_output(str(tmp_path / "out"))["error"].to_pylist()
    assert [row for row, error in enumerate(errors) if error is not None] == [DEADLY]
    assert "vanished" in errors[DEADLY]
    assert client.retry(job_id, quarantined=True) == 1
    live("")
    assert store.get_job(job_id).state is JobState.DONE
    store.close()


def _silent(_: DueWork) -> None:
    """The sweeper finds it."""
