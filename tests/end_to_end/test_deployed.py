"""Rows are drafted for by the models that are deployed for them; outputs stay the same."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from specbatch.pipeline.bootstrap import Worker, make_client, make_worker
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.learning.registry import register
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.registry import DeployScope
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import load_spec
from support.models import TinyPair

KINDS = ("ingest", "verify", "record")


def run(worker: Worker, settings: Settings, spec: dict[str, Any]) -> dict[int, tuple[int, ...]]:
    """Tokens by row."""
    job, _ = make_client(settings, lambda _: None, worker.store).submit(load_spec(spec))
    while not worker.store.get_job(job.job_id).state.is_final:
        for message in worker.store.due(job_id=job.job_id):
            worker.run(message.stage, message.job_id, message.group_index)
    return {one.row_index: one.token_ids for one in worker.store.completions(job.job_id)}


def drafted_for(store: Store, job_name: str) -> set[tuple[str | None, str]]:
    """(tag, fingerprint) of the draft models that were asked."""
    counts = store.acceptance("default", job_name)
    return {(c.tag, c.fingerprint) for c in counts if c.proposer.startswith("draft-model")}


def test_rows_are_drafted_for_by_the_deployed_model(tmp_path: Path, tiny_pair: TinyPair) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": str(i), "prompt": f"row {i}", "tag": "ab"[i % 2]} for i in range(8)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Settings(workspace=str(tmp_path / "workspace"))
    names = [str(tiny_pair.verifier), str(tiny_pair.draft), str(tiny_pair.verifier)]
    big, small = inspect_model(names[0]), inspect_model(names[1])
    spec = {
        "input": {"uri": str(prompts)},
        "verifier": names[0],
        "sampling": {"max_tokens": 24, "ignore_eos": True},
        "engine": {"dtype": "float32"},
        "speculation": {"sources": ["draft-model"], "depth": 3, "history_tokens": 0},
    }
    outputs = []
    for job_name, deployed in (("first", small), ("second", big)):
        worker = make_worker(
            settings, KINDS, lambda _: None, *names[:2], extra_draft_models=(names[0],)
        )
        with closing(worker):
            for folder in (small, big):
                register(worker.store, "docs", folder)
            wanted = deployed.fingerprint.digest
            worker.store.promote(wanted, DeployScope(), "for all")
            worker.store.promote(small.fingerprint.digest, DeployScope(tag="b"), "for b")
            output = {"uri": str(tmp_path / job_name)}
            outputs.append(run(worker, settings, {**spec, "name": job_name, "output": output}))
            assert drafted_for(worker.store, job_name) == {
                ("a", wanted),
                ("b", small.fingerprint.digest),
            }
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == len(rows)
