"""`make bench-scale`: many verifier processes on one store and broker, and the store's own limit.

    workers  1, 2, 8, 32 verifier processes whose engines wait instead of computing, `group_sec` for
             a group; one process ingests and records. Throughput is that of the groups between the
             first and last seventh, by the store's clock: starting and ending do not count.
    store    claims, advances and commits of groups and nothing else, by 1 to 32 client processes,
             on one job and on a job for each client: what the store can take.

Engines that wait leave the machine to the rest, so the cores bound the number of groups a second,
not the number of workers. `cpu` says which share of all cores was busy with us.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.benchmarks.fleet import fleet
from specbatch.benchmarks.private_servers import Servers, servers
from specbatch.benchmarks.processes import cpu_sec
from specbatch.benchmarks.store_client import ROWS, TOKENS, VERIFIER
from specbatch.jobs.chaos import stand_in_model
from specbatch.pipeline.bootstrap import make_client, make_store
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.outputs.outputs import read_manifest
from specbatch.schemas.records import (
    Artefact,
    JobState,
    NewGroup,
    NewJob,
    SourcePosition,
    Stage,
)
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import load_spec
from specbatch.workers.app import make_app, make_enqueue

RESULTS = Path(__file__).parent / "results"
POLL_SEC = 0.5
STEPS = 8  # of the waiting engine, for a group
LEAST, MOST = 1 / 7, 6 / 7  # of the groups, between which throughput is taken
PARTS = ("workers", "store")
Row = dict[str, Any]


# --- workers ------------------------------------------------------------------------------------


def workers_row(around: Servers, number: int, count: int, group_sec: float, per_worker: int) -> Row:
    """One job on so many verifier processes; `number` is its database's on Redis."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = stand_in_model.write_model(work / "model")
        settings = Settings(
            broker_url=around.redis.url_of(number),
            database_url=around.postgres.create_database(),
            workspace=str(work / "workspace"),
        )
        groups = max(count, 2) * per_worker
        source = write_prompts(work / "in.parquet", groups * ROWS)
        store = make_store(settings)
        client = make_client(settings, make_enqueue(make_app(settings)), store)
        verify = ("--kinds", "verify", "--concurrency", "2")
        engine = ("--step-sec", str(group_sec / STEPS), "--max-sequences", str(ROWS))
        started = time.monotonic()
        kinds: dict[str, Sequence[str]] = {"rest": ("--kinds", "ingest", "record")}
        kinds |= {f"verify-{i}": (*verify, *engine) for i in range(count)}
        with fleet(settings, model, kinds, work) as running:
            start_sec = time.monotonic() - started
            pids = [*running.pids.values(), around.redis.pid, around.postgres.pid]
            before, begun = sum(cpu_sec(pid) for pid in pids if pid), time.time()
            spec = {
                "input": {"uri": str(source)},
                "output": {"uri": str(work / "out")},
                "verifier": str(model),
                "sampling": {"max_tokens": STEPS, "ignore_eos": True},
                "speculation": {"depth": "off"},
                "group_size": ROWS,
            }
            job, _ = client.submit(load_spec(spec))
            while not (job := store.get_job(job.job_id)).state.is_final:
                time.sleep(POLL_SEC)
            used = sum(cpu_sec(pid) for pid in pids if pid) - before
            elapsed = time.time() - begun
        if job.state is not JobState.DONE or read_manifest(str(work / "out")).rows != groups * ROWS:
            raise SystemExit(f"the job ended as {job.state}: {job.error}")
        done = done_at(settings.database_url, job.job_id)
        store.close()
    first, last = int(len(done) * LEAST), int(len(done) * MOST)
    return {
        "verifiers": count,
        "groups": groups,
        "group_sec": group_sec,
        "groups_per_sec": round((last - first) / (done[last] - done[first]), 4),
        "job_sec": round(elapsed, 2),
        "start_sec": round(start_sec, 2),
        "cpu": round(used / elapsed / (os.cpu_count() or 1), 3),
        "cpu_sec_per_group": round(used / groups, 4),
    }


def write_prompts(path: Path, rows: int) -> Path:
    table = {"id": [f"row-{i}" for i in range(rows)], "prompt": [f"say {i}" for i in range(rows)]}
    pq.write_table(pa.table(table), path)
    return path


def done_at(url: str, job_id: str) -> list[float]:
    """When its groups were committed, in order."""
    query = "SELECT ready_at FROM groups WHERE job_id = %s AND stage = 'done' ORDER BY ready_at"
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute(query, (job_id,))]


# --- the store ----------------------------------------------------------------------------------


def store_row(around: Servers, clients: int, groups: int, one_job: bool) -> Row:
    """`groups` groups by so many client processes at once."""
    url = around.postgres.create_database()
    store = make_store(Settings(database_url=url, workspace="/nowhere"))
    each = groups // clients
    jobs = [f"scale{number:06d}" for number in range(1 if one_job else clients)]
    for job_id in jobs:
        add_job(store, job_id, each * (clients if one_job else 1))
    command = (sys.executable, "-m", "specbatch.benchmarks.store_client", url)
    running = []
    for number in range(clients):
        job_id, first = (jobs[0], number * each) if one_job else (jobs[number], 0)
        process = subprocess.Popen(
            [*command, job_id, str(first), str(each)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
    for process in running:
        assert process.stdout is not None, "it is a pipe"
        process.stdout.readline()
    before = cpu_sec(around.postgres.pid or 0)
    for process in running:
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [json.loads(process.communicate()[0]) for process in running]
    served = cpu_sec(around.postgres.pid or 0) - before
    seconds = max(one["ended"] for one in results) - min(one["begun"] for one in results)
    finished = sum(store.progress(job_id).groups_done for job_id in jobs)
    store.close()
    if finished != each * clients:
        raise SystemExit(f"{finished} of {each * clients} groups were committed")
    timed = sum(one["groups"] for one in results)
    return {
        "clients": clients,
        "jobs": len(jobs),
        "groups_per_sec": round(timed / seconds, 1),
        "postgres_cpu_sec_per_group": round(served / timed, 5),
        "client_cpu_sec_per_group": round(sum(one["cpu_sec"] for one in results) / timed, 5),
        "cpu": round(
            (served + sum(o["cpu_sec"] for o in results)) / seconds / (os.cpu_count() or 1), 3
        ),
    }


def add_job(store: Store, job_id: str, groups: int) -> None:
    """A job whose input is read."""
    store.create_job(
        NewJob(job_id, job_id, "default", {}, job_id, f"{VERIFIER}-of-{job_id}", None, "/o", "/w")
    )
    work = store.claim_job(job_id, Stage.INGEST, "bench", 600.0)
    assert work is not None, "nobody else claims it"
    prompts = Artefact("file:///prompts.arrow", "0" * 64, 1)
    at = SourcePosition("file:///in.parquet", "v", 0, 0)
    planned = [
        NewGroup(index, at, ROWS, ROWS * 64, prompts, Stage.VERIFY, ROWS * 192, 192)
        for index in range(groups)
    ]
    store.add_groups(work.lease, planned, [], groups * ROWS, at)
    store.finish_ingest(work.lease, groups * ROWS, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--verifiers", type=int, nargs="+", default=[1, 2, 8, 32])
    parser.add_argument("--group-sec", type=float, default=4.0)
    parser.add_argument("--per-worker", type=int, default=14, help="groups for each verifier")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--groups", type=int, default=960, help="of the store's part")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    arguments = parser.parse_args()
    path = arguments.results / "scale.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    with servers() as around:
        found["machine"] = around.facts
        if "workers" in arguments.parts:
            rows: list[Row] = []
            for number, count in enumerate(arguments.verifiers):
                row = workers_row(around, number, count, arguments.group_sec, arguments.per_worker)
                row["times_one"] = (
                    round(row["groups_per_sec"] / rows[0]["groups_per_sec"], 2) if (rows) else 1.0
                )
                rows.append(row)
                print(json.dumps(row), flush=True)
            found["workers"] = rows
        if "store" in arguments.parts:
            found["store_group"] = {"rows": ROWS, "tokens_per_row": TOKENS}
            found["store"] = []
            for one_job in (True, False):
                for clients in arguments.clients:
                    found["store"].append(store_row(around, clients, arguments.groups, one_job))
                    print(json.dumps(found["store"][-1]), flush=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
