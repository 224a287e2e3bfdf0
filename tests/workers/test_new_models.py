"""`--proposer models:NAME` stands for other models while a worker runs: it takes them up itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.schemas.settings import Settings
from support import forks
from support.models import tiny_llama
from support.workers import WAIT_SEC, WorkerProcess, command, wait_until, worker

pytestmark = pytest.mark.pipeline  # starts processes

ROWS, LONG, SHORT = 16, 500, 24
ANEW = "this worker starts anew"
BEGUN = "worker for verify on "


class Place:
    """A folder with a verifier, two versions of a draft model, the first deployed, and workers."""

    def __init__(self, home: Path, redis_url: str, postgres_url: str, stack: ExitStack) -> None:
        self.home, self._stack = home, stack
        sizes: dict[str, Any] = {"vocab_size": 300, "hidden": 64, "heads": 2}  # the native path's
        self.verifier = tiny_llama(home / "verifier", layers=3, **sizes)
        self.drafts = [tiny_llama(home / f"draft-{n}", layers=1, seed=n, **sizes) for n in (1, 2)]
        self.digests = [inspect_model(str(path)).fingerprint.digest for path in self.drafts]
        rows = [{"id": str(i), "prompt": f"prompt number {i} of many"} for i in range(ROWS)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (home / "prompts.jsonl").write_text(lines)
        self.environment = {
            "SPECBATCH_WORKSPACE": str(home / "workspace"),
            "SPECBATCH_DATABASE_URL": postgres_url,
            "SPECBATCH_BROKER_URL": redis_url,
            "SPECBATCH_SWEEP_INTERVAL_SEC": "0.5",
            "SPECBATCH_LEASE_SEC": "3",
        }
        settings = Settings(database_url=postgres_url, workspace=str(home / "workspace"))
        self.store = stack.enter_context(closing(make_store(settings)))
        for path in self.drafts:
            self.run("specbatch", "models", "add", "docs", str(path))
        self.promote(1)

    def run(self, *arguments: str, **environment: str) -> None:
        done = forks.run(
            *arguments, environment=self.environment | environment, cwd=self.home, timeout=WAIT_SEC
        )
        assert done.returncode == 0, done.stderr[-3000:]

    def promote(self, version: int) -> None:
        self.run("specbatch", "models", "promote", f"docs:{version}", "--reason", "better")

    def workers(self, by_shell: bool) -> WorkerProcess:
        """The verify worker, with others beside it. `by_shell`: it has a command line of its own,
        with which it can start anew."""
        self._worker("ingest")
        self.recorder = self._worker("record")
        models = ("--verifier", str(self.verifier), "--proposer", "models:docs")
        return self._worker("verify", *models, by_shell=by_shell)

    def _worker(self, *arguments: str, by_shell: bool = False) -> WorkerProcess:
        return self._stack.enter_context(
            worker(*arguments, environment=self.environment, cwd=self.home, by_shell=by_shell)
        )

    def job(self, name: str, tokens: int, depth: int = 3, *more: str) -> list[str]:
        return [
            *("submit-job", "--input", "prompts.jsonl", "--output", f"out-{name}", "--name", name),
            *("--verifier", str(self.verifier), "--dtype", "float32", "--group-size", "4"),
            *("--max-tokens", str(tokens), "--ignore-eos", "--temperature", "0.7", "--seed", "5"),
            *("--depth", str(depth), "--sources", "draft-model", *more),
        ]

    def submit(self, name: str, tokens: int) -> str:
        """A job's id."""
        found = command(*self.job(name, tokens), environment=self.environment, cwd=self.home)
        return str(found["job"])

    def held(self) -> int:
        """Groups that a verify worker has."""
        query = b"SELECT count(*) FROM groups WHERE lease_until > 0 AND stage = 'verify'"
        with psycopg.connect(self.environment["SPECBATCH_DATABASE_URL"]) as connection:
            (found,) = connection.execute(query).fetchone() or (0,)
        return int(found)

    def ended(self, job_id: str) -> bool:
        return self.store.get_job(job_id).state.is_final

    def tokens(self, job_id: str) -> dict[int, tuple[int, ...]]:
        assert self.store.get_job(job_id).state == "done"
        return {one.row_index: one.token_ids for one in self.store.completions(job_id)}

    def drafted(self, name: str) -> set[str]:
        """Fingerprints of the models whose drafts were verified in jobs of this name."""
        return {one.fingerprint for one in self.store.acceptance("default", name)}

    def undrafted(self, tokens: int) -> dict[int, tuple[int, ...]]:
        """What the verifier writes without drafts, with a store of its own."""
        alone = Settings(workspace=str(self.home / "alone"))
        environment = {"SPECBATCH_WORKSPACE": alone.workspace, "SPECBATCH_DATABASE_URL": ""}
        self.run(*self.job("alone", tokens, 0, "--local"), **environment)
        with closing(make_store(alone)) as store:
            (job,) = store.list_jobs()
            assert not any(one.proposed for one in store.completions(job.job_id))
            return {one.row_index: one.token_ids for one in store.completions(job.job_id)}


@pytest.fixture
def place(tmp_path: Path, redis_url: str, postgres_url: str) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(tmp_path, redis_url, postgres_url, stack)


def test_a_worker_takes_up_a_promoted_model_and_loses_nothing(place: Place) -> None:
    one = place.workers(by_shell=True)
    place.recorder.freeze()  # so the job has not ended before, however fast this machine is
    under_way = place.submit("under-way", LONG)
    wait_until("a group is in hand", lambda: place.held() > 0, [one])
    place.promote(2)
    wait_until("the worker notices", lambda: ANEW in one.text(), [one])
    assert not place.ended(under_way)
    place.recorder.thaw()
    wait_until("it has started anew", lambda: one.text().count(BEGUN) == 2, [one])
    after = place.submit("after", SHORT)
    for job_id in (under_way, after):
        wait_until("the job ends", lambda job_id=job_id: place.ended(job_id), [one])
    assert place.drafted("after") == {place.digests[1]}
    assert place.drafted("under-way") <= set(place.digests)
    written = place.undrafted(LONG)
    assert place.tokens(under_way) == written
    assert place.tokens(after) == {row: tokens[:SHORT] for row, tokens in written.items()}
    assert one.end().count(ANEW) == 1
    assert one.process.poll() == 0
    assert place.held() == 0


def test_a_worker_goes_on_where_a_promoted_model_has_vanished(place: Place) -> None:
    shutil.rmtree(place.drafts[1])
    one = place.workers(by_shell=False)
    wait_until("the worker runs", lambda: BEGUN in one.text(), [one])
    place.promote(2)
    wait_until("the worker notices", lambda: "cannot be loaded" in one.text(), [one])
    after = place.submit("after", SHORT)
    wait_until("the job ends", lambda: place.ended(after), [one])
    assert place.tokens(after) == place.undrafted(SHORT)
    assert place.drafted("after") == {place.digests[0]}
    said = one.end()
    assert said.count("cannot be loaded") == 1
    assert ANEW not in said
    assert one.process.poll() == 0
