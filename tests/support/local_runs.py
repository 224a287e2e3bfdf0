"""Jobs of `submit-job --local` in a folder with a model, prompts and a store."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.schemas.settings import Settings
from support import forks
from support.databases import migrated
from support.models import tiny_llama
from support.workers import WAIT_SEC, wait_until

ROWS = 96


class LocalRuns:
    """A folder in which commands run; `environment` is added to theirs."""

    def __init__(
        self,
        home: Path,
        environment: Mapping[str, str] | None = None,
        rows: int = ROWS,
        tokens: int = 48,
        group: int = 8,
    ) -> None:
        self.home = home
        self._rows, self._tokens, self._group = rows, tokens, group
        self.workspace = home / "specbatch-data"
        self.model = tiny_llama(home / "model", vocab_size=300, hidden=64, layers=3, heads=4)
        prompts = [f"prompt number {i} of many" for i in range(rows)]
        ids = [f"row-{i}" for i in range(rows)]
        pq.write_table(pa.table({"id": ids, "prompt": prompts}), home / "prompts.parquet")
        self.environment = {
            "SPECBATCH_WORKSPACE": str(self.workspace),
            "SPECBATCH_SWEEP_INTERVAL_SEC": "0.3",
            **(environment or {}),
        }
        migrated(self.workspace / "specbatch.db")
        self.store: Store = make_store(Settings(workspace=str(self.workspace)))

    def job(self, output: str, *more: object) -> list[str]:
        """The command that submits a job and does it here."""
        return [
            *("submit-job", "--local", "--input", "prompts.parquet", "--output", output),
            *("--verifier", str(self.model), "--dtype", "float32", "--name", output),
            *("--max-tokens", str(self._tokens), "--temperature", "0.8", "--seed", "5"),
            *("--group-size", str(self._group), *map(str, more)),
        ]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command to its end: its return code and what it wrote."""
        return forks.run(*command, environment=self.environment, cwd=self.home, timeout=WAIT_SEC)

    def ended_in_the_middle(self, number: signal.Signals, output: str) -> tuple[str, str]:
        """Begin a job and send its process a signal once some rows are done; the job's id, and
        what it wrote."""
        known = {job.job_id for job in self.store.list_jobs()}
        log_path = self.home / f"{output}.log"
        with log_path.open("wb") as log:
            process = forks.fork(
                *self.job(output),
                environment=self.environment,
                cwd=self.home,
                stdout=log,
                stderr=log,
            )
            try:
                wait_until(
                    "some rows are recorded",
                    lambda: any(self.done(i) for i in self._since(known)) or process.poll(),
                )
                process.send_signal(number)
                process.wait(WAIT_SEC)
            finally:
                process.kill()
                process.wait()
        [job_id] = self._since(known)
        told = log_path.read_text()
        assert 0 < self.done(job_id) < self._rows, told[-2000:]
        return job_id, told

    def _since(self, known: set[str]) -> set[str]:
        return {job.job_id for job in self.store.list_jobs()} - known

    def done(self, job_id: str) -> int:
        """Rows of the job that are done."""
        return self.store.progress(job_id).rows_done

    def leases_run_out(self) -> None:
        """As if nobody had been there for long: nobody has to wait for that."""
        database = sqlite3.connect(self.workspace / "specbatch.db")
        with database:
            for table in ("groups", "jobs"):
                database.execute(f"UPDATE {table} SET lease_until = 1 WHERE lease_until > 0")
            database.execute("UPDATE worker_sessions SET beat_at = 1, started_at = 1")
        database.close()

    def output(self, output: str) -> dict[str, str]:
        """Texts by row id, of an output without errors."""
        table = read_output(str(self.home / output))
        assert table["error"].null_count == self._rows
        return dict(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))
