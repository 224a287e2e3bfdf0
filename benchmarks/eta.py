"""`make bench-eta`: how far off the shown end of a job is.

Twenty jobs of the demo pair run one after the other in this process: few and many prompts, short
and long outputs, of one length and of many, one or many sequences at once, with drafts and
without. What `submit-job` would show is taken every 0.2 s, once with the counts of the engine
(`--local`) and once without (a job on other machines). After a tenth and after a half of the
tokens, the shown end is compared with the real one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from specbatch.benchmarks.engine import RESULTS
from specbatch.benchmarks.overhead_job import write_input
from specbatch.jobs.bench.machine import machine
from specbatch.jobs.bench.models import BenchModel, demo_model
from specbatch.jobs.running.here import engine_counts
from specbatch.pipeline.bootstrap import Worker, make_client
from specbatch.pipeline.observe.terminal.progress import EngineCounts, Meter, Reading
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec, load_spec
from specbatch.workers.app import make_enqueue
from specbatch.workers.lifecycle import embedded

SEED = 7
JOBS = 20
EVERY_SEC = 0.2
AT_ONCE, PROMPTS = (1, 8, 64), (128, 384, 640)  # about ten seconds each on two cores
SHARES = (0.1, 0.5)  # of the job's tokens
BAR = 0.15  # of the median error after a tenth
LOCAL, REMOTE = "local", "remote"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a job is like."""

    prompts: int
    max_tokens: int
    at_once: int
    depth: str
    ends_early: bool  # outputs of many lengths
    group_size: int


@dataclass(frozen=True, slots=True)
class Sample:
    """What was known at a moment, in seconds since the submission."""

    at: float
    progress: JobProgress
    engine: EngineCounts


def shapes(count: int) -> list[Shape]:
    """Jobs of every kind, those with as many sequences at once together."""
    draw = random.Random(SEED)
    made = [
        Shape(
            prompts=PROMPTS[number % 3],
            max_tokens=draw.choice((32, 64)),
            at_once=AT_ONCE[number % 3],
            depth=("auto", "off")[number % 2],
            ends_early=number % 4 > 1,
            group_size=draw.choice((16, 64)),
        )
        for number in range(count)
    ]
    return sorted(made, key=lambda shape: shape.at_once)


def run_all(model: BenchModel, wanted: Sequence[Shape]) -> Iterator[tuple[Shape, list[Sample]]]:
    """The jobs, those with as many sequences at once on one worker."""
    for at_once, group in groupby(wanted, key=lambda shape: shape.at_once):
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            settings = Settings(
                broker_url="memory://localhost/",
                database_url=f"sqlite:///{work / 'store.db'}",
                workspace=str(work / "workspace"),
                max_concurrent_sequences=at_once,
            )
            with embedded(settings, str(model.folder), str(model.draft)) as (app, worker):
                client = make_client(settings, make_enqueue(app), worker.store)
                for number, shape in enumerate(group):
                    spec = spec_of(shape, model, work / f"{number}.parquet", work / f"{number}")
                    write_input(work / f"{number}.parquet", shape.prompts)
                    yield shape, run(client, worker, spec)


def run(client: Client, worker: Worker, spec: JobSpec) -> list[Sample]:
    """One job from its submission to its end."""
    before, begun = engine_counts(worker), time.monotonic()
    job, _ = client.submit(spec)
    return [
        Sample(time.monotonic() - begun, progress, _since(before, engine_counts(worker)))
        for progress in client.follow(job.job_id, EVERY_SEC, None)
    ]


def _since(before: EngineCounts, now: EngineCounts) -> EngineCounts:
    return EngineCounts(now.finished - before.finished, now.tokens - before.tokens)


def spec_of(shape: Shape, model: BenchModel, source: Path, output: Path) -> JobSpec:
    ends = {"stop": ["\n\n"]} if shape.ends_early else {"ignore_eos": True}
    return load_spec(
        {
            "name": "eta",
            "input": {"uri": str(source)},
            "output": {"uri": str(output)},
            "verifier": str(model.folder),
            "proposer": str(model.draft),
            "group_size": shape.group_size,
            "sampling": {"max_tokens": shape.max_tokens, **ends},
            "speculation": {"depth": shape.depth, "history_tokens": 0},
        }
    )


def readings(samples: Sequence[Sample], shape: Shape, way: str) -> list[Reading]:
    """What is shown at each sample."""
    now = 0.0
    meter = Meter(max_tokens=shape.max_tokens, clock=lambda: now)
    shown = []
    for sample in samples:
        now = sample.at
        shown.append(meter.read(sample.progress, sample.engine if way == LOCAL else None))
    return shown


def judged(samples: Sequence[Sample], shape: Shape, way: str) -> dict[str, Any]:
    """The shown end beside the real one, after each share of the job's tokens."""
    shown = readings(samples, shape, way)
    end, tokens = samples[-1].at, samples[-1].progress.completion_tokens
    row: dict[str, Any] = {"end_sec": round(end, 2), "tokens": tokens}
    for share in SHARES:
        found = first_after(samples, shown, share * tokens)
        if found is None:  # too short to be told
            continue
        sample, reading = found
        assert reading.eta_sec is not None
        left = end - sample.at
        row[f"at_{share:.0%}"] = {
            "at_sec": round(sample.at, 2),
            "left_sec": round(left, 2),
            "eta_sec": round(reading.eta_sec, 2),
            "error": round(abs(reading.eta_sec - left) / left, 3),
            "inside": reading.eta_range is not None
            and reading.eta_range[0] <= left <= reading.eta_range[1],
        }
    return row


def first_after(
    samples: Sequence[Sample], shown: Sequence[Reading], tokens: float
) -> tuple[Sample, Reading] | None:
    """The first moment with a shown end after so many tokens, while the job runs."""
    for sample, reading in zip(samples, shown, strict=True):
        if sample.progress.state.is_final:
            return None
        if reading.tokens >= tokens and reading.eta_sec is not None:
            return sample, reading
    return None


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median error and the share of jobs that ended within the interval, by way and share."""
    told: dict[str, Any] = {}
    for way in (LOCAL, REMOTE):
        for share in SHARES:
            at = [row[way][key] for row in rows if (key := f"at_{share:.0%}") in row[way]]
            if not at:  # all too short
                continue
            told[f"{way}_at_{share:.0%}"] = {
                "jobs": len(at),
                "median_error": round(statistics.median(one["error"] for one in at), 3),
                "worst_error": max(one["error"] for one in at),
                "inside": round(statistics.fmean(one["inside"] for one in at), 2),
            }
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--keep", type=Path, help="file for all samples, to judge them again")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    arguments = parser.parse_args()
    model = demo_model()
    rows: list[dict[str, Any]] = []
    kept: list[Any] = []
    for number, (shape, samples) in enumerate(run_all(model, shapes(arguments.jobs))):
        kept.append((shape, samples))
        row = {way: judged(samples, shape, way) for way in (LOCAL, REMOTE)}
        rows.append({"prompts": shape.prompts, "max_tokens": shape.max_tokens,
                     "at_once": shape.at_once, "depth": shape.depth,
                     "ends_early": shape.ends_early, **row})  # fmt: skip
        print(f"{number + 1}/{arguments.jobs}: {row[LOCAL]}", flush=True)
    if arguments.keep:
        import pickle

        arguments.keep.write_bytes(pickle.dumps(kept))
    found = {"machine": machine(), "bar": BAR, **medians(rows), "jobs": rows}
    path = arguments.results / "eta-demo.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(medians(rows), indent=1))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
