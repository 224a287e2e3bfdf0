"""`make bench-per-group`: what a group takes of every part of an installation.

In processor seconds, statements, requests, bytes and messages.

One job, through worker processes of every kind, on a private Redis, PostgreSQL and S3. The engine
is the stand-in: what is counted is everything but the model. A stage's figures are those that the
store keeps of its attempts (`stage_usage`). Then `specbatch serve` takes a batch of as many
requests as the job had rows, and answers who asks for it.

What workers and servers take by the hour (sweeps, heartbeats) is not in it: `make bench-drain` has
that, over ten thousand groups. No figure is a time by the clock, except where its name says `wall`.
The service's batch includes the questions of the client that waits for it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import redis

from specbatch.benchmarks.drain import write_input
from specbatch.benchmarks.fleet import END_SEC, fleet
from specbatch.benchmarks.private_servers import Servers, servers
from specbatch.benchmarks.processes import cpu_sec
from specbatch.jobs.chaos import stand_in_model
from specbatch.pipeline.bootstrap import make_client, make_store
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.provenance import TICKS_PER_SEC
from specbatch.schemas.records import JobState
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import load_spec
from specbatch.workers.app import make_app, make_enqueue
from support.servers import PrivateS3, free_port

RESULTS = Path(__file__).parent / "results"
ROWS = 64  # of a group
POLL_SEC = 0.5
ASKED = 300  # times that a client asks how far its batch is
WORKERS = {kind: ("--kinds", kind) for kind in ("ingest", "propose", "verify", "record")}
_STAGES = """
SELECT stage, count(*), sum(cpu_ticks), sum(store_statements), sum(object_writes),
       sum(object_reads), sum(stored_bytes)
  FROM stage_usage WHERE job_id = %s AND kept GROUP BY stage ORDER BY stage
"""


def per_group(
    around: Servers,
    work: Path,
    groups: int,
    new_tokens: int,
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """Hand the figures of the job and of the service to `keep`, before the workers end."""
    model = stand_in_model.write_model(work / "model")
    with _s3() as bucket:
        settings = Settings(
            broker_url=around.redis.url,
            database_url=around.postgres.create_database(),
            workspace=f"s3://{bucket}/workspace",
        )
        make_store(settings).close()  # makes its tables
        with fleet(settings, model, WORKERS, work):
            found = _job(settings, work, model, bucket, groups, new_tokens)
            found["serve"] = _serve(settings, work, model, groups * ROWS, new_tokens)
            keep(found)


def _job(
    settings: Settings,
    work: Path,
    model: Path,
    bucket: str,
    groups: int,
    new_tokens: int,
) -> dict[str, Any]:
    store = make_store(settings)
    client = make_client(settings, make_enqueue(make_app(settings)), store)
    write_input(work / "in.parquet", groups * ROWS)
    spec = {
        "input": {"uri": str(work / "in.parquet")},
        "output": {"uri": f"s3://{bucket}/out"},
        "verifier": str(model),
        "proposer": str(model),
        "sampling": {"max_tokens": new_tokens, "ignore_eos": True},
        "speculation": {"history_tokens": 0, "pregenerate": True, "pregenerate_tokens": 16},
        "group_size": ROWS,
    }
    before = _pushed(settings)
    job, _ = client.submit(load_spec(spec))
    drained = _until_final(store, job.job_id)
    done = store.get_job(job.job_id)
    store.close()
    if done.state is not JobState.DONE or done.finished_at is None:
        raise SystemExit(f"the job ended as {done.state}: {done.error}")
    tokens = groups * ROWS * new_tokens
    with psycopg.connect(settings.database_url) as connection:
        stages = connection.execute(_STAGES, (job.job_id,)).fetchall()
    objects = Objects().list(f"s3://{bucket}/")
    return {
        "groups": groups,
        "rows_per_group": ROWS,
        "tokens_per_row": new_tokens,
        "publish_wall_sec": round(done.finished_at - drained, 1),
        "stages": {
            str(row[0]): {
                "attempts": int(row[1]),
                "cpu_sec_per_group": _rounded(float(row[2]) / TICKS_PER_SEC / groups),
                "statements_per_group": _rounded(float(row[3]) / groups),
                "object_writes_per_group": _rounded(float(row[4]) / groups),
                "object_reads_per_group": _rounded(float(row[5]) / groups),
                "stored_bytes_per_token": _rounded(float(row[6]) / tokens),
            }
            for row in stages
        },
        "redis": {
            "messages_per_group": _rounded((_pushed(settings) - before) / groups),
        },
        "object_store": {
            "objects_per_group": _rounded(len(objects) / groups),
            "bytes_per_token": _rounded(sum(one.size for one in objects) / tokens),
        },
    }


def _until_final(store: Any, job_id: str) -> float:
    """Wait for the job's end; when the last group was done."""
    drained = 0.0
    while True:
        progress = store.progress(job_id)
        if not drained and progress.ingest_done and progress.groups_done == progress.groups_total:
            drained = time.time()
        if progress.state.is_final:
            return drained or time.time()
        time.sleep(POLL_SEC)


def _pushed(settings: Settings) -> int:
    """Messages that were enqueued so far."""
    with redis.Redis.from_url(settings.broker_url) as server:
        found = server.info("commandstats").get("cmdstat_lpush", {"calls": 0})
    return int(found["calls"])


# --- the service --------------------------------------------------------------------------------


def _serve(
    settings: Settings, work: Path, model: Path, requests: int, new_tokens: int
) -> dict[str, Any]:
    """A batch from its upload to its download, asked for `ASKED` times after its end."""
    values = {"verifier": str(model), "spec": {"sampling": {"ignore_eos": True}}}
    models = work / "models.yaml"
    models.write_text(json.dumps({"models": {"small": values}}))
    with _service(settings, work, models) as (pid, http):
        body = {"model": "small", "max_tokens": new_tokens}
        lines = "".join(
            json.dumps(
                {
                    "custom_id": f"row-{i}",
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": {**body, "prompt": f"what is {i} + {i}?"},
                }
            )
            + "\n"
            for i in range(requests)
        )
        at = [cpu_sec(pid)]
        given = {"purpose": "batch"}
        file = _said(http.post("/v1/files", data=given, files={"file": ("in.jsonl", lines)}))
        at.append(cpu_sec(pid))
        asked = {
            "input_file_id": file["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        batch = _said(http.post("/v1/batches", json=asked))
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            time.sleep(POLL_SEC)
            batch = _said(http.get(f"/v1/batches/{batch['id']}"))
        if batch["status"] != "completed" or batch["request_counts"]["completed"] != requests:
            raise SystemExit(f"the batch ended as {batch['status']}: {batch['errors']}")
        at.append(cpu_sec(pid))
        for _ in range(ASKED):
            _said(http.get(f"/v1/batches/{batch['id']}"))
        at.append(cpu_sec(pid))
        http.get(f"/v1/files/{batch['output_file_id']}/content").raise_for_status()
        at.append(cpu_sec(pid))
    upload, run, asking, download = (after - before for before, after in pairwise(at))
    return {
        "requests": requests,
        "upload_cpu_sec_per_1000_requests": _rounded(upload / requests * 1000),
        "batch_cpu_sec_per_1000_requests": _rounded(run / requests * 1000),
        "download_cpu_sec_per_1000_requests": _rounded(download / requests * 1000),
        "ask_cpu_sec": _rounded(asking / ASKED),
    }


@contextmanager
def _service(settings: Settings, work: Path, models: Path) -> Iterator[tuple[int, httpx2.Client]]:
    port = free_port()
    environment = os.environ | {
        "SPECBATCH_BROKER_URL": settings.broker_url,
        "SPECBATCH_DATABASE_URL": settings.database_url,
        "SPECBATCH_WORKSPACE": settings.workspace,
    }
    command = [str(Path(sys.executable).parent / "specbatch"), "serve", "--no-keys"]
    options = ["--models", str(models), "--dir", str(work / "serve"), "--port", str(port)]
    with (work / "serve.log").open("w") as log:
        process = subprocess.Popen(
            [*command, *options, "--rate", "off"], env=environment, stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx2.Client(base_url=url, timeout=300, trust_env=False) as http:
            while True:
                try:
                    _said(http.get("/v1/models"))
                    break
                except httpx2.TransportError:
                    if process.poll() is not None:
                        raise SystemExit((work / "serve.log").read_text()) from None
                    time.sleep(POLL_SEC)
            yield process.pid, http
    finally:
        process.terminate()
        try:
            process.wait(END_SEC)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _said(answer: httpx2.Response) -> dict[str, Any]:
    if answer.is_error:
        raise SystemExit(f"{answer.request.url}: {answer.text}")
    return dict(answer.json())


@contextmanager
def _s3() -> Iterator[str]:
    """A bucket, to which the environment leads this process and those it starts."""
    with PrivateS3() as server:
        before = dict(os.environ)
        os.environ.update(
            {
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": server.region,
                "AWS_REGION": server.region,
                "AWS_ENDPOINT_URL": server.url,
                "AWS_EC2_METADATA_DISABLED": "true",
                "NO_PROXY": "127.0.0.1",
            }
        )
        try:
            yield server.create_bucket()
        finally:
            os.environ.clear()
            os.environ.update(before)


def _rounded(value: float) -> float:
    """Three digits that count: the fourth is chance."""
    return float(f"{value:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--note", help="about the machine, kept in the file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, servers() as around:

        def keep(found: dict[str, Any]) -> None:
            noted = {"note": arguments.note} if arguments.note else {}
            path = arguments.results / "per-group.json"
            text = json.dumps({**noted, "machine": around.facts, **found}, indent=1) + "\n"
            path.write_text(text)
            print(f"{text}written to {path}", flush=True)

        per_group(around, Path(folder), arguments.groups, arguments.new_tokens, keep)


if __name__ == "__main__":
    main()
