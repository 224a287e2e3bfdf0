"""`make bench-drain`: a million short prompts through ingest, verify, record and publish.

The engine is the stand-in, and takes no time: what is timed is everything else. An input of that
size is made at run time. Three worker processes (ingest, verify, record) on a private Redis and
PostgreSQL. Their resident memory is read at every twentieth of the rows and must be flat: `growth`
is the most there was later over what there was at a fifth, when everything is loaded and all pools
are full.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.benchmarks.fleet import fleet
from specbatch.benchmarks.private_servers import postgres_counts, servers
from specbatch.benchmarks.processes import cpu_sec, own_bytes, resident_bytes
from specbatch.jobs.chaos import stand_in_model
from specbatch.pipeline.bootstrap import make_client, make_store
from specbatch.pipeline.outputs.outputs import read_manifest
from specbatch.schemas.records import JobState
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import load_spec
from specbatch.workers.app import make_app, make_enqueue

RESULTS = Path(__file__).parent / "results"
POINTS = 20  # of the rows, at which memory is read
SETTLED = POINTS // 5  # the point that later ones are compared with
POLL_SEC = 0.5
ROWS_PER_ROW_GROUP = 50_000
WORKERS = {
    "ingest": ("--kinds", "ingest"),
    "verify": ("--kinds", "verify"),
    "record": ("--kinds", "record"),  # it publishes, too
}


@dataclass(slots=True)
class Drained:
    """A job from its submission to its end."""

    rows: int
    groups: int
    seconds: dict[str, float] = field(default_factory=dict)  # since the submission
    memory: dict[str, list[int]] = field(default_factory=dict)  # bytes at each point, by process
    cpu_sec: dict[str, float] = field(default_factory=dict)

    def growth(self) -> dict[str, float]:
        """The most memory of the points after `SETTLED`, over that at `SETTLED`."""
        return {
            name: max(points[SETTLED:]) / points[SETTLED]
            for name, points in self.memory.items()
            if len(points) > SETTLED
        }

    def as_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "groups": self.groups,
            "rows_per_sec": round(self.rows / self.seconds["published"], 1),
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
            "cpu_sec": {name: round(value, 1) for name, value in self.cpu_sec.items()},
            "memory_mib": {
                name: [round(size / 2**20, 1) for size in points]
                for name, points in self.memory.items()
            },
            "growth": {name: round(value, 3) for name, value in self.growth().items()},
        }


def write_input(path: Path, rows: int) -> None:
    """Ids and short prompts, written a row group at a time."""
    schema = pa.schema([("id", pa.string()), ("prompt", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, rows, ROWS_PER_ROW_GROUP):
            numbers = range(first, min(rows, first + ROWS_PER_ROW_GROUP))
            columns = [[f"row-{i}" for i in numbers], [f"what is {i} + {i}?" for i in numbers]]
            writer.write_table(pa.table(columns, schema=schema))


def drain(
    settings: Settings,
    work: Path,
    rows: int,
    group_size: int,
    new_tokens: int,
    servers_pids: dict[str, int],
    say: Callable[[str], None],
) -> Drained:
    """Write the input, start the workers, and follow the job to its end."""
    model = stand_in_model.write_model(work / "model")
    source, out = work / "in.parquet", work / "out"
    write_input(source, rows)
    store = make_store(settings)
    client = make_client(settings, make_enqueue(make_app(settings)), store)
    spec = {
        "input": {"uri": str(source)},
        "output": {"uri": str(out)},
        "verifier": str(model),
        "sampling": {"max_tokens": new_tokens, "ignore_eos": True},
        "speculation": {"depth": "off"},
        "group_size": group_size,
    }
    done = Drained(rows, -(-rows // group_size))
    with fleet(settings, model, WORKERS, work) as running:
        pids = running.pids | servers_pids
        before = {name: cpu_sec(pid) for name, pid in pids.items()}
        job, _ = client.submit(load_spec(spec))
        submitted = time.time()
        while True:
            progress = store.progress(job.job_id)
            now = time.time() - submitted
            if progress.ingest_done:
                done.seconds.setdefault("ingested", now)
            if progress.ingest_done and progress.groups_done == progress.groups_total:
                done.seconds.setdefault("drained", now)
            while len(done.memory.get("verify", ())) < POINTS * progress.rows_done // rows:
                for name, pid in pids.items():
                    size = own_bytes(pid) if name in servers_pids else resident_bytes(pid)
                    done.memory.setdefault(name, []).append(size)
                say(f"{now:.0f} s: {progress.rows_done} rows done, {progress.rows_total} read")
            if progress.state.is_final:
                break
            time.sleep(POLL_SEC)
        done.cpu_sec = {name: cpu_sec(pid) - before[name] for name, pid in pids.items()}
    job = store.get_job(job.job_id)
    store.close()
    if job.state is not JobState.DONE or job.finished_at is None:
        raise SystemExit(f"the job ended as {job.state}: {job.error}")
    done.seconds["published"] = job.finished_at - submitted
    found = read_manifest(str(out))
    if (found.rows, found.completions) != (rows, rows):
        raise SystemExit(f"{found.rows} rows came out, {found.completions} of them completed")
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--group-size", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, servers() as around:
        settings = Settings(
            broker_url=around.redis.url,
            database_url=around.postgres.create_database(),
            workspace=str(Path(folder) / "workspace"),
        )
        of_servers = {"redis": around.redis.pid, "postgres": around.postgres.pid}
        pids = {name: pid for name, pid in of_servers.items() if pid is not None}
        done = drain(
            settings,
            Path(folder),
            arguments.rows,
            arguments.group_size,
            arguments.new_tokens,
            pids,
            lambda line: print(line, flush=True),
        )
        facts = around.facts
        counts = postgres_counts(settings.database_url)
    path = arguments.results / "drain.json"
    found = {"machine": facts} | done.as_json() | {"postgres": counts}
    found["transactions_per_group"] = round(counts["transactions"] / done.groups, 2)
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k != "memory_mib"}, indent=1))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
