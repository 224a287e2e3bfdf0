"""The Python interface as its users type it: `tools/setup/types` checks this file, nothing runs it.

It fails there if `import specbatch` loses a name, or if a function's types change.
"""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import polars as pl
import pyarrow as pa

import specbatch
from specbatch import Client, Job, JobInterrupted, Report, arun, run, submit


def frames(frame: pl.DataFrame) -> None:
    assert_type(run(frame, model="m"), pl.DataFrame)
    assert_type(run(frame, model=Path("m"), output="out", max_tokens=8), str)
    assert_type(run("prompts.parquet", model="m", output=Path("out")), str)
    assert_type(run(spec="job.yaml"), str)


async def in_a_loop(frame: pl.DataFrame) -> None:
    assert_type(await arun(frame, model="m"), pl.DataFrame)
    assert_type(await arun(frame, model="m", output="out"), str)


def jobs(table: pa.Table) -> Report:
    job = submit(table, model="m", temperature=0.5, stop=["\n"])
    assert_type(job, Job)
    assert_type(Client().job("latest").wait(timeout=1.0).status, str)
    try:
        assert_type(Client(store_url="sqlite:///x").jobs(5, state="done"), list[Job])
    except JobInterrupted as stopped:
        assert_type(stopped.job_id, str)
    return job.report()


def mistakes(frame: pl.DataFrame) -> None:
    run(frame, model="m", max_tokenz=8)  # type: ignore[call-overload]  # no such option
    run(frame, model="m", dtype="float8")  # type: ignore[call-overload]  # no such value
    run(["a list"], model="m")  # type: ignore[call-overload]  # no frame, no path
    specbatch.rum()  # type: ignore[attr-defined]  # no such name
