"""With a broker the service runs nothing itself: workers elsewhere do its batches."""

from __future__ import annotations

from pathlib import Path

from serve.conftest import URL, jsonl, line, serving

from specbatch.jobs.serve.models import ServedModel
from support.models import TinyPair
from support.workers import wait_until, worker


def test_a_batch_is_done_by_workers_of_the_broker(
    tmp_path: Path, tiny_pair: TinyPair, redis_url: str
) -> None:
    models = ["--verifier", str(tiny_pair.verifier), "--proposer", str(tiny_pair.draft)]
    values = {
        "verifier": str(tiny_pair.verifier),
        "proposer": str(tiny_pair.draft),
        "sampling": {"max_tokens": 5},
        "engine": {"dtype": "float32"},
    }
    folder = tmp_path / "dir"
    environment = {"SPECBATCH_BROKER_URL": redis_url, "SPECBATCH_WORKSPACE": str(folder)}
    served_models = {"small": ServedModel("small", values, tmp_path)}
    with (
        serving(folder, served_models, redis_url) as served,
        worker("all", *models, environment=environment, cwd=tmp_path) as one,
    ):
        client = served.client()
        file = client.files.create(file=jsonl(line("a"), line("b")), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint=URL, completion_window="24h"
        )  # fmt: skip
        served.reconciler.start()
        try:
            wait_until(
                "the batch ends",
                lambda: client.batches.retrieve(batch.id).status == "completed",
                [one],
            )
        finally:
            served.reconciler.close()
        done = client.batches.retrieve(batch.id)
        assert done.output_file_id is not None
        assert len(list(client.files.content(done.output_file_id).iter_lines())) == 2
