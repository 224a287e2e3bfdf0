"""`make bench-overhead`: a job's whole path beside the engine alone on the same prompts.

The path is what a user waits for: from the submission over a private Redis and PostgreSQL (synced),
ingest from Parquet, claims, groups' files, verifying, lessons, records and the published Parquet to
the job's end by the store's clock. Alone is the same engine with the same requests, handed over at
once. Both take turns, and an overhead is the median of ratios within such turns.

    one        all kinds in one process; alone is timed on its very engine
    all        `specbatch worker all`: what needs no engine is in a process beside the engine's;
               alone is timed on its very engine
    separate   a worker process for each kind; alone is timed on an engine of its own beside them

Everything shares the machine's cores: with two of them and two threads in the engine, every second
that the servers and stages compute is taken from the engine. The `parts` say how much that is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specbatch.benchmarks.engine import RESULTS
from specbatch.benchmarks.overhead_job import rows_of, spec_of, write_input
from specbatch.benchmarks.private_servers import Servers, servers
from specbatch.benchmarks.processes import cpu_sec
from specbatch.benchmarks.worker_times import Parts, StageTimes, StepTimes, threads_cpu_sec
from specbatch.jobs.bench.machine import machine
from specbatch.jobs.bench.models import BenchModel, demo_model
from specbatch.jobs.cli.console import begin_process
from specbatch.jobs.cli.second_process import KINDS as SECOND_KINDS
from specbatch.jobs.cli.second_process import SecondProcess
from specbatch.pipeline.bootstrap import KINDS, make_client, make_store
from specbatch.pipeline.engines.contract import Engines
from specbatch.pipeline.engines.exact.host import EngineHost
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.pipeline.runtime.client import Client
from specbatch.pipeline.runtime.knowledge_store import KnowledgeStore
from specbatch.pipeline.stages.requests import requests_of
from specbatch.schemas.records import JobState, PromptRow
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec
from specbatch.workers.app import make_app, make_enqueue
from specbatch.workers.lifecycle import embedded

POLL_SEC = 0.5  # of the one who waits, who shares the cores; the end itself is told by the store
BAR = 0.05
CONCURRENCY = 16
ALONE, PATH = "alone", "path"
Outputs = dict[int, tuple[int, ...]]  # token ids by row


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of all prompts, one way or the other."""

    seconds: float
    outputs: Outputs
    busy_sec: float  # the engine's steps; 0 where the engine is in another process
    parts: Parts = field(default_factory=dict)
    inside: Parts = field(
        default_factory=dict
    )  # of the process with the engine that is timed alone


@dataclass(slots=True)
class Course:
    """Where a job is run, and the engine that is timed alone."""

    client: Client
    store: Store
    host: Engines  # for alone
    pids: dict[str, int]  # whose processor time is told
    same_engine: bool
    stage_times: StageTimes = field(default_factory=StageTimes)
    step_times: StepTimes = field(default_factory=StepTimes)
    turns: int = 0

    def alone(self, spec: JobSpec, rows: Sequence[PromptRow]) -> Turn:
        """All requests at once to the engine; nothing else but its drafts' lessons."""
        self.turns += 1
        job_id = f"alone{self.turns:05d}"
        enabled = spec.speculation.enabled
        priors = self.store.acceptance(spec.tenant, spec.name) if enabled else ()
        requests = [r for row in rows for r in requests_of(job_id, spec, row, _no_text)]
        before, cpu, inside = self._busy(), self._cpu(), self._inside()
        begun = time.perf_counter()
        ticket = self.host.service(spec.engine).submit(job_id, requests, priors)
        done = ticket.wait()
        seconds = time.perf_counter() - begun
        busy = self._busy() - before
        parts, inside = _less(self._cpu(), cpu), _less(self._inside(), inside)
        self.store.learn_acceptance(spec.tenant, spec.name, ticket.lessons.counts)
        outputs = {
            row.row_index: completion.token_ids for row, completion in zip(rows, done, strict=True)
        }
        return Turn(seconds, outputs, busy, parts, inside)

    def path(self, spec: JobSpec) -> Turn:
        """A job of them, submitted and waited for."""
        self.stage_times.spent.clear()
        before, busy, inside = self._cpu(), self._busy(), self._inside()
        begun = time.time()
        job, _ = self.client.submit(spec)
        while not (job := self.store.get_job(job.job_id)).state.is_final:
            time.sleep(POLL_SEC)
        time.sleep(POLL_SEC)  # the publishing task may still be on its way out
        if job.state is not JobState.DONE or job.finished_at is None:
            raise SystemExit(f"the job ended as {job.state}: {job.error}")
        seconds = job.finished_at - begun
        parts, inside = _less(self._cpu(), before), _less(self._inside(), inside)
        parts |= self.stage_times.parts(begun, job.finished_at)
        table = read_output(spec.output.uri)
        outputs = dict(
            zip(
                table["row_index"].to_pylist(), map(tuple, table["token_ids"].to_pylist()),
                strict=True,
            )
        )  # fmt: skip
        return Turn(seconds, outputs, self._busy() - busy, parts, inside)

    def _busy(self) -> float:
        return sum(stats.busy_sec for stats in self.host.stats)

    def _inside(self) -> Parts:
        return self.step_times.read() | threads_cpu_sec() if self.same_engine else {}

    def _cpu(self) -> Parts:
        return {
            f"{name}_cpu_sec": time.process_time() if pid == os.getpid() else cpu_sec(pid)
            for name, pid in self.pids.items()  # the servers are below this process
        }


def _less(now: Parts, before: Parts) -> Parts:
    return {name: now[name] - before[name] for name in now}


def _no_text(_: Sequence[int]) -> str:
    raise AssertionError("there are no stop strings here")


# --- the two courses ----------------------------------------------------------------------------


@contextmanager
def one_process(settings: Settings, model: BenchModel, around: Servers) -> Iterator[Course]:
    """All kinds of work in this process, on the real servers."""
    with _embedded(settings, model, around, KINDS) as course:
        yield course


@contextmanager
def worker_all(settings: Settings, model: BenchModel, around: Servers) -> Iterator[Course]:
    """As `specbatch worker all` has it: what needs no engine is in a process beside this one."""
    kinds = tuple(kind for kind in KINDS if kind not in SECOND_KINDS)
    with (
        closing(SecondProcess(settings, CONCURRENCY)) as other,
        _embedded(settings, model, around, kinds) as course,
    ):
        course.pids["beside"] = other.pid
        yield course


@contextmanager
def _embedded(
    settings: Settings, model: BenchModel, around: Servers, kinds: tuple[str, ...]
) -> Iterator[Course]:
    verifier, proposer = str(model.folder), str(model.draft)
    with embedded(settings, verifier, proposer, None, CONCURRENCY, kinds) as (app, worker):
        pids = _server_pids(around) | {"worker": os.getpid()}
        client = make_client(settings, make_enqueue(app), worker.store)
        course = Course(client, worker.store, worker.engines[0], pids, same_engine=True)
        with course.stage_times.watched(), course.step_times.watched():
            yield course


@contextmanager
def separate_processes(settings: Settings, model: BenchModel, around: Servers) -> Iterator[Course]:
    """A process of each kind but propose: the draft model is beside the verifier."""
    verifier, proposer = str(model.folder), str(model.draft)
    store = make_store(settings)
    knowledge = KnowledgeStore(store)
    host = EngineHost(
        inspect_model(verifier),
        inspect_model(proposer),
        settings.max_concurrent_sequences,
        settings.max_batch_tokens,
        settings.kv_cache_bytes,
        knowledge_store=knowledge,
    )
    pids = _server_pids(around)
    with ExitStack() as stack:
        for kind in ("ingest", "verify", "record"):
            process = stack.enter_context(_worker(kind, settings, verifier, proposer))
            pids[f"{kind}_worker"] = process.pid
        client = make_client(settings, make_enqueue(make_app(settings)), store)
        yield Course(client, store, host, pids, same_engine=False)
    host.close()
    knowledge.close()
    store.close()


@contextmanager
def _worker(
    kind: str, settings: Settings, verifier: str, proposer: str
) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        "SPECBATCH_BROKER_URL": settings.broker_url,
        "SPECBATCH_DATABASE_URL": settings.database_url,
        "SPECBATCH_WORKSPACE": settings.workspace,
    }
    code = "from specbatch.jobs.cli.main import main; main()"
    models = ("--verifier", verifier, "--proposer", proposer)
    process = subprocess.Popen(
        [sys.executable, "-c", code, "worker", kind, *models], env=os.environ | environment
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _server_pids(around: Servers) -> dict[str, int]:
    found = {"redis": around.redis.pid, "postgres": around.postgres.pid}
    return {name: pid for name, pid in found.items() if pid is not None}


COURSES = {"one": one_process, "all": worker_all, "separate": separate_processes}


# --- what is run --------------------------------------------------------------------------------


def measure(
    course: Course, model: BenchModel, n: int, depth: str, arguments: argparse.Namespace, work: Path
) -> dict[str, Any]:
    """Turns of both ways; the first is to warm up and to learn."""
    source = work / f"prompts-{n}.parquet"
    write_input(source, n)

    def spec(turn: int) -> JobSpec:
        return spec_of(model, depth, source, work / f"out-{turn}", arguments.new_tokens)

    rows = rows_of(spec(0))
    alone: list[Turn] = []
    path: list[Turn] = []
    for turn in range(arguments.runs + 1):
        for way in (ALONE, PATH) if turn % 2 else (PATH, ALONE):  # who goes first changes
            if way == ALONE:
                alone.append(course.alone(spec(turn), rows))
            else:
                path.append(course.path(spec(turn)))
        shutil.rmtree(work / f"out-{turn}")
        print(
            f"n={n} depth {depth} {'run' if turn else 'warm-up'}: alone {alone[-1].seconds:.3f} s,"
            f" path {path[-1].seconds:.3f} s",
            flush=True,
        )
    same = [a.outputs == p.outputs for a, p in zip(alone, path, strict=True)]
    return {
        "n": n,
        "depth": depth,
        "new_tokens": arguments.new_tokens,
        "same_outputs": all(same),
        **figures(alone[1:], path[1:], course.same_engine),
    }


def figures(alone: Sequence[Turn], path: Sequence[Turn], same_engine: bool) -> dict[str, Any]:
    """Ratios within turns, their median, and the median of every part."""
    ratios = [p.seconds / a.seconds - 1 for a, p in zip(alone, path, strict=True)]
    parts = {name: statistics.median(p.parts[name] for p in path) for name in path[0].parts}
    if same_engine:
        more = [
            sum(p.parts[name] for name in a.parts) - sum(a.parts.values())
            for a, p in zip(alone, path, strict=True)
        ]
        parts["more_cpu_sec"] = statistics.median(more)
        parts["alone_cpu_sec"] = statistics.median(sum(a.parts.values()) for a in alone)
        for name in path[0].inside:
            parts[name] = statistics.median(p.inside[name] for p in path)
            parts[f"alone_{name}"] = statistics.median(a.inside[name] for a in alone)
        parts["engine_idle_sec"] = statistics.median(p.seconds - p.busy_sec for p in path)
        parts["engine_slower_sec"] = statistics.median(
            p.busy_sec - a.busy_sec for a, p in zip(alone, path, strict=True)
        )
    return {
        "overhead": round(statistics.median(ratios), 4),
        "overheads": [round(ratio, 4) for ratio in ratios],
        "overhead_in_all": round(
            sum(p.seconds for p in path) / sum(a.seconds for a in alone) - 1, 4
        ),
        "alone_sec": [round(turn.seconds, 4) for turn in alone],
        "path_sec": [round(turn.seconds, 4) for turn in path],
        "parts": {name: round(value, 4) for name, value in parts.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--depths", nargs="+", choices=("off", "auto"), default=["off", "auto"])
    parser.add_argument("--processes", nargs="+", choices=COURSES, default=list(COURSES))
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, help="of the engine; fewer than cores leave one for the rest"
    )
    parser.add_argument("--switch-sec", type=float, help="Python's, in the one process; to compare")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    arguments = parser.parse_args()
    begin_process()  # as a worker's
    model = demo_model()
    name = "overhead-demo"
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # of workers in other processes
        name += f"-{arguments.threads}-threads"
    path = arguments.results / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, servers() as around:
        header = {"machine": machine() | around.facts, "model": model.name, "bar": BAR}
        for number, name in enumerate(arguments.processes):
            work = Path(folder) / name
            work.mkdir()
            settings = Settings(
                broker_url=around.redis.url_of(number),
                database_url=around.postgres.create_database(),
                workspace=str(work / "workspace"),
            )
            with COURSES[name](settings, model, around) as course:
                if arguments.switch_sec is not None:
                    sys.setswitchinterval(arguments.switch_sec)
                for depth in arguments.depths:
                    for n in arguments.n:
                        row = measure(course, model, n, depth, arguments, work)
                        rows.append({"processes": name} | row)
                        path.write_text(json.dumps(header | {"rows": rows}, indent=1) + "\n")
    for row in rows:
        print(
            f"{row['processes']:>8} depth {row['depth']:<4} n={row['n']:<5} overhead"
            f" {row['overhead']:+.1%} ({', '.join(f'{x:+.1%}' for x in row['overheads'])})"
        )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
