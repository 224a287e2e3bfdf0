"""The demo job, whole: in one process, and as a process per kind over real servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from conftest import S3

from specbatch.pipeline.outputs.outputs import read_manifest, read_output
from support import demo

# What a run measures of itself differs from run to run; everything else may not.
MEASURED = ("acceptance_rate", "cost_usd")
SETTINGS = ("--max-tokens", "32", "--temperature", "0.8", "--top-p", "0.95", "--seed", "7")
MODELS = ("--verifier", str(demo.VERIFIER), "--proposer", str(demo.DRAFT))
WAIT_SEC = 240
BIN = Path(sys.executable).parent


def submit(arguments: list[str], environment: dict[str, str], cwd: Path) -> dict[str, object]:
    """Run `submit-job … --json`; its last line."""
    done = subprocess.run(
        [str(BIN / "submit-job"), *arguments, "--json"],
        env=os.environ | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=WAIT_SEC + 60,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


@contextmanager
def worker(kind: str, environment: dict[str, str], cwd: Path) -> Iterator[None]:
    """A worker process of one kind, ended softly."""
    log = cwd / f"worker-{kind}.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [str(BIN / "specbatch"), "worker", kind, *MODELS],
            env=os.environ | environment,
            cwd=cwd,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        try:
            yield
            assert process.poll() is None, f"worker {kind} died: {log.read_text()[-2000:]}"
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=120)
        finally:
            process.kill()
            process.wait()


def outcome(table: pa.Table) -> list[dict[str, object]]:
    return list(table.drop_columns(list(MEASURED)).to_pylist())


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], pa.Table]:
    """The job in one process: SQLite, a broker in memory, a local folder."""
    home = tmp_path_factory.mktemp("embedded")
    report = submit(
        ["--local", "--input", str(demo.PROMPTS), "--output", "out", *MODELS, *SETTINGS],
        {"SPECBATCH_WORKSPACE": str(home / "workspace")},
        home,
    )
    return report, read_output(str(home / "out"))


def test_rows_in_are_rows_out_with_each_id_once(
    embedded: tuple[dict[str, object], pa.Table],
) -> None:
    report, table = embedded
    assert report["state"] == "done"
    assert report["rows"] == table.num_rows == 256
    assert report["rows_failed"] == 0
    assert len(set(table["id"].to_pylist())) == 256
    assert table["row_index"].to_pylist() == list(range(256))
    assert report["tokens"] == sum(table["completion_tokens"].to_pylist())
    assert all(table["text"].to_pylist())


def distributed(broker_url: str, postgres_url: str, s3: S3, cwd: Path) -> pa.Table:
    """The job with a process per kind of worker; its output."""
    s3.client().upload_file(str(demo.PROMPTS), s3.bucket, "in/prompts.parquet")
    environment = {
        "SPECBATCH_BROKER_URL": broker_url,
        "SPECBATCH_DATABASE_URL": postgres_url,
        "SPECBATCH_WORKSPACE": f"{s3.uri}/workspace",
        "SPECBATCH_S3_ENDPOINT_URL": s3.endpoint_url,
        "SPECBATCH_MAX_CONCURRENT_SEQUENCES": "48",  # another batch than the embedded run's
    }
    with ExitStack() as workers:
        for kind in ("ingest", "propose", "verify", "record"):
            workers.enter_context(worker(kind, environment, cwd))
        report = submit(
            [
                *("--input", f"{s3.uri}/in/prompts.parquet", "--output", f"{s3.uri}/out"),
                *(*MODELS, *SETTINGS, "--group-size", "40"),
                *("--wait", "--timeout", str(WAIT_SEC)),
            ],
            environment,
            cwd,
        )
    assert report["state"] == "done"
    assert read_manifest(f"{s3.uri}/out").completions == 256
    return read_output(f"{s3.uri}/out")


def test_four_worker_processes_over_redis_postgresql_and_s3_write_the_same_outputs(
    embedded: tuple[dict[str, object], pa.Table],
    redis_url: str,
    postgres_url: str,
    s3: S3,
    tmp_path: Path,
) -> None:
    table = distributed(redis_url, postgres_url, s3, tmp_path)
    assert outcome(table) == outcome(embedded[1])


def test_four_worker_processes_over_rabbitmq_write_the_same_outputs(
    embedded: tuple[dict[str, object], pa.Table],
    rabbit_url: str,
    postgres_url: str,
    s3: S3,
    tmp_path: Path,
) -> None:
    table = distributed(rabbit_url, postgres_url, s3, tmp_path)
    assert outcome(table) == outcome(embedded[1])
