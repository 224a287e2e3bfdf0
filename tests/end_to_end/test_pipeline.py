"""A job of the demo pair, whole: in one process, and as a process per kind over real servers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import S3

from specbatch.pipeline.outputs.outputs import read_manifest, read_output
from support import demo
from support.workers import command, worker

# What a run measures of itself differs from run to run; everything else may not.
MEASURED = ("acceptance_rate", "cost_usd")
SETTINGS = ("--max-tokens", "32", "--temperature", "0.8", "--top-p", "0.95", "--seed", "7")
MODELS = ("--verifier", str(demo.VERIFIER), "--proposer", str(demo.DRAFT))
ROWS = 96
WAIT_SEC = 240


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first of the demo's prompts."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.parquet"
    pq.write_table(pq.read_table(demo.PROMPTS).slice(0, ROWS), path)
    return path


def outcome(table: pa.Table) -> list[dict[str, Any]]:
    return list(table.drop_columns(list(MEASURED)).to_pylist())


@pytest.fixture(scope="module")
def embedded(
    prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], pa.Table]:
    """The job in one process: SQLite, a broker in memory, a local folder."""
    home = tmp_path_factory.mktemp("embedded")
    report = command(
        *("submit-job", "--local", "--input", str(prompts), "--output", "out", *MODELS, *SETTINGS),
        environment={"SPECBATCH_WORKSPACE": str(home / "workspace")},
        cwd=home,
    )
    return report, read_output(str(home / "out"))


def test_rows_in_are_rows_out_with_each_id_once(
    embedded: tuple[dict[str, Any], pa.Table],
) -> None:
    report, table = embedded
    assert report["state"] == "done"
    assert report["rows"] == table.num_rows == ROWS
    assert report["rows_failed"] == 0
    assert len(set(table["id"].to_pylist())) == ROWS
    assert table["row_index"].to_pylist() == list(range(ROWS))
    assert report["tokens"] == sum(table["completion_tokens"].to_pylist())
    assert all(table["text"].to_pylist())


def distributed(
    prompts: Path, broker_url: str, postgres_url: str, s3: S3, cwd: Path, by_shell: bool
) -> pa.Table:
    """The job with a process per kind of worker; its output."""
    s3.client().upload_file(str(prompts), s3.bucket, "in/prompts.parquet")
    environment = {
        "SPECBATCH_BROKER_URL": broker_url,
        "SPECBATCH_DATABASE_URL": postgres_url,
        "SPECBATCH_WORKSPACE": f"{s3.uri}/workspace",
        "SPECBATCH_S3_ENDPOINT_URL": s3.endpoint_url,
        "SPECBATCH_MAX_CONCURRENT_SEQUENCES": "24",  # another batch than the embedded run's
    }
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                worker(
                    *(kind, *MODELS),
                    environment=environment,
                    cwd=cwd,
                    by_shell=by_shell and kind == "record",
                )
            )
            for kind in ("ingest", "propose", "verify", "record")
        ]
        report = command(
            *("submit-job", "--input", f"{s3.uri}/in/prompts.parquet"),
            *("--output", f"{s3.uri}/out", *MODELS, *SETTINGS, "--group-size", "20"),
            *("--wait", "--timeout", str(WAIT_SEC)),
            environment=environment,
            cwd=cwd,
        )
        for one in workers:
            assert one.process.poll() is None, f"a worker died: {one.text()[-2000:]}"
            one.end()
    assert report["state"] == "done"
    assert read_manifest(f"{s3.uri}/out").completions == ROWS
    return read_output(f"{s3.uri}/out")


def test_four_worker_processes_over_redis_postgresql_and_s3_write_the_same_outputs(
    embedded: tuple[dict[str, Any], pa.Table],
    prompts: Path,
    redis_url: str,
    postgres_url: str,
    s3: S3,
    tmp_path: Path,
) -> None:
    table = distributed(prompts, redis_url, postgres_url, s3, tmp_path, by_shell=True)
    assert outcome(table) == outcome(embedded[1])


def test_four_worker_processes_over_rabbitmq_write_the_same_outputs(
    embedded: tuple[dict[str, Any], pa.Table],
    prompts: Path,
    rabbit_url: str,
    postgres_url: str,
    s3: S3,
    tmp_path: Path,
) -> None:
    table = distributed(prompts, rabbit_url, postgres_url, s3, tmp_path, by_shell=False)
    assert outcome(table) == outcome(embedded[1])
