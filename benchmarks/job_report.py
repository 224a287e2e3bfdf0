"""`make bench-report`: the report of a large job: how long it takes to make, what it weighs, and
how soon a browser has opened it.

The job is put straight into a SQLite store by the tests' builder. The report is made in a process
of its own, so that the memory it took is known; Chromium opens it in turns with an empty page,
whose time is told beside it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.observe.report.page import page
from specbatch.pipeline.operations.report import gather
from specbatch.schemas.settings import Settings
from support.big_job import make_big_job
from support.browser import Browser

RESULTS = Path(__file__).parent / "results"
RUNS = 5


def make(folder: Path, job: str, pipe: Any) -> None:
    """In a process of its own: write the report, tell seconds and memory."""
    settings = Settings(database_url=f"sqlite:///{folder / 'big.db'}", workspace=str(folder))
    store = make_store(settings)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, cpu = time.perf_counter(), time.process_time()
    html = page(gather(store, settings, job, samples=6, made_at=time.time()))
    seconds, cpu_sec = time.perf_counter() - begin, time.process_time() - cpu
    (folder / "report.html").write_text(html)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store.close()
    pipe.send(
        {
            "seconds": round(seconds, 2),
            "cpu_sec": round(cpu_sec, 2),
            "memory_mib_before": round(before / 1024, 1),
            "memory_mib_at_most": round(after / 1024, 1),
        }
    )


def opened(report: Path, empty: Path, runs: int) -> dict[str, Any]:
    """Milliseconds until the load event, once to warm up and then `runs` times in turns."""
    found: dict[str, list[float]] = {"report": [], "empty": []}
    with Browser() as browser:
        for turn in range(runs + 1):
            for name, path in (("report", report), ("empty", empty)):
                timing = browser.open(path)
                if turn:
                    found[name].append(timing["loadEventEnd"])
    return {
        f"{name}_opens_ms": {
            "median": round(statistics.median(values), 1),
            "most": round(max(values), 1),
        }
        for name, values in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    arguments = parser.parse_args()
    rows = []
    for count in arguments.rows:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            job = make_big_job(folder / "big.db", count)
            ours, theirs = multiprocessing.Pipe(duplex=False)
            context = multiprocessing.get_context("spawn")
            process = context.Process(target=make, args=(folder, job, theirs))
            process.start()
            made = ours.recv()
            process.join()
            empty = folder / "empty.html"
            empty.write_text("<!DOCTYPE html><title>empty</title>")
            size = (folder / "report.html").stat().st_size
            row = {"rows": count, "bytes": size, "made": made}
            rows.append(row | opened(folder / "report.html", empty, arguments.runs))
            print(json.dumps(rows[-1]), flush=True)
    machine = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    path = arguments.results / "report.json"
    path.write_text(json.dumps({"machine": machine, "jobs": rows}, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
