"""A model's files are replaced while a job is under way: nobody mixes tokens of two models."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.settings import Settings
from support import forks
from support.models import tiny_llama
from support.workers import WAIT_SEC, WorkerProcess, command, wait_until, worker

ROWS, GROUP, TOKENS = 96, 8, 48
KEY = "nightly-1"


class Place:
    """A folder with a model, prompts and a store, in which commands run."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.model = tiny_llama(home / "model", vocab_size=300, hidden=64, layers=3, heads=4)
        (self.model / "generation_config.json").write_text(json.dumps({"eos_token_id": [257]}))
        prompts = [f"prompt number {i} of many" for i in range(ROWS)]
        ids = [f"row-{i}" for i in range(ROWS)]
        pq.write_table(pa.table({"id": ids, "prompt": prompts}), home / "prompts.parquet")
        self.environment = {"SPECBATCH_WORKSPACE": str(home / "specbatch-data")}
        self.store: Store = make_store(Settings(workspace=str(home / "specbatch-data")))

    def job(self, output: str, *more: object, model: Path | None = None) -> list[str]:
        return [
            *("submit-job", "--input", "prompts.parquet", "--output", output),
            *("--verifier", str(model or self.model), "--dtype", "float32"),
            *("--max-tokens", str(TOKENS), "--temperature", "0.8", "--seed", "5"),
            *("--group-size", str(GROUP), *map(str, more)),
        ]

    def run(self, *arguments: str) -> Any:
        """A command to its end: its return code and what it wrote."""
        return forks.run(*arguments, environment=self.environment, cwd=self.home, timeout=WAIT_SEC)

    def killed_in_the_middle(self, *arguments: str) -> str:
        """Begin a job here and kill -9 its process once some rows are done; the job's id."""
        with (self.home / "killed.log").open("wb") as log:
            process = forks.fork(
                *arguments, environment=self.environment, cwd=self.home, stdout=log, stderr=log
            )
            try:
                wait_until("some rows are recorded", lambda: self.done() > 0 or process.poll())
            finally:
                process.kill()
                process.wait()
        [job] = self.store.list_jobs()
        assert 0 < self.done() < ROWS, (self.home / "killed.log").read_text()[-2000:]
        for table in ("groups", "jobs"):  # nobody has to wait here until its leases are over
            self.sql(f"UPDATE {table} SET lease_until = 1 WHERE lease_until > 0")
        return job.job_id

    def sql(self, statement: str) -> None:
        database = sqlite3.connect(self.home / "specbatch-data" / "specbatch.db")
        with database:
            database.execute(statement)
        database.close()

    def done(self) -> int:
        return sum(self.store.progress(job.job_id).rows_done for job in self.store.list_jobs())

    def tokens(self, job_id: str) -> dict[int, tuple[int, ...]]:
        return {record.row_index: record.token_ids for record in self.store.completions(job_id)}

    def written_otherwise(self, job_id: str, expected: dict[int, tuple[int, ...]]) -> list[int]:
        """Rows that are done, and not as they should be."""
        written = self.tokens(job_id)
        return [row for row, tokens in written.items() if tokens != expected[row]]


def alter_weights(model: Path) -> None:
    """Change some of the file's bytes where they are, as a write over it would."""
    path = model / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-40_000, 2)
        values = bytearray(file.read(40_000))
        for place in range(2, len(values), 4):
            values[place] ^= 0x40  # of each float32 a bit of its mantissa
        file.seek(-40_000, 2)
        file.write(values)


def other_end(model: Path) -> None:
    """Other stop tokens."""
    path = model / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [257, *range(97, 110)]}))


def other_tokenizer(model: Path) -> None:
    """Other merges: the same text is other tokens."""
    values = json.loads((model / "tokenizer.json").read_text())
    vocab, merges = values["model"]["vocab"], values["model"]["merges"]
    last = [name for name, token in vocab.items() if token >= 259]
    for name, token in zip(last, sorted((vocab[n] for n in last), reverse=True), strict=True):
        vocab[name] = token
    values["model"]["merges"] = merges
    (model / "tokenizer.json").write_text(json.dumps(values))


def other_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text(
        "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[int, ...]]:
    """What the model writes that nobody touches."""
    place = Place(tmp_path_factory.mktemp("untouched"))
    done = place.run(*place.job("out", "--local"))
    assert done.returncode == 0, done.stderr[-3000:]
    [job] = place.store.list_jobs()
    written = place.tokens(job.job_id)
    place.store.close()
    assert len(written) == ROWS
    return written


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.store.close()


def complaint(done: Any) -> str:
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    [said] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return str(said)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("weights", alter_weights),
        ("generation config", other_end),
        ("tokenizer", other_tokenizer),
        ("chat template", other_template),
    ],
)
def test_the_same_command_after_a_kill_and_a_change_stops_and_says_what_changed(
    place: Place, expected: dict[int, tuple[int, ...]], part: str, change: Any
) -> None:
    call = place.job("out", "--local", "--idempotency-key", KEY)
    job_id = place.killed_in_the_middle(*call)
    kept = shutil.copytree(place.model, place.home / "kept")
    change(place.model)

    said = complaint(place.run(*call))
    assert f"other {part} (fingerprint " in said
    assert str(place.model) in said
    assert place.written_otherwise(job_id, expected) == []
    assert place.done() < ROWS
    # A prompt is tokens of one tokenizer and template: only the other parts may be accepted.
    accepting = f"specbatch retry {job_id} --local --accept-model"
    if part in ("weights", "generation config"):
        assert accepting in said
    else:
        assert accepting not in said
        assert "submit a new job" in said
        refused = complaint(place.run("specbatch", "retry", job_id, "--local", "--accept-model"))
        assert f"its prompts are tokens of another {part}; submit it as a new job" in refused

    shutil.rmtree(place.model)
    shutil.copytree(kept, place.model)
    again = place.run(*call)
    assert again.returncode == 0, again.stderr[-3000:]
    assert place.tokens(job_id) == expected


def test_changed_weights_are_accepted_on_purpose(
    place: Place, expected: dict[int, tuple[int, ...]]
) -> None:
    job_id = place.killed_in_the_middle(*place.job("out", "--local"))
    alter_weights(place.model)
    accepted = place.run("specbatch", "retry", job_id, "--local", "--accept-model")
    assert accepted.returncode == 0, accepted.stderr[-3000:]
    models: dict[int, set[str | None]] = {}
    for record in place.store.completions(job_id):
        models.setdefault(record.row_index // GROUP, set()).add(record.model_fingerprint)
    assert len(models) == ROWS // GROUP
    assert all(len(of_group) == 1 for of_group in models.values()), "no group has two models"
    now = place.store.get_job(job_id).model_fingerprint
    assert {now} < set.union(*models.values())
    former = {r for r in expected if models[r // GROUP] != {now}}
    assert former
    written = place.tokens(job_id)
    assert all(written[row] == expected[row] for row in former)
    audited = place.run("specbatch", "audit", job_id, "--json")
    assert audited.returncode == 0, audited.stdout[-2000:] + audited.stderr[-2000:]


def test_weights_that_change_under_a_running_engine_change_nothing_it_writes(
    place: Place, expected: dict[int, tuple[int, ...]]
) -> None:
    with (place.home / "job.log").open("wb") as log:
        process = forks.fork(
            *place.job("out", "--local"),
            environment=place.environment,
            cwd=place.home,
            stdout=log,
            stderr=log,
        )
        try:
            wait_until("some rows are recorded", lambda: place.done() > 0 or process.poll())
            alter_weights(place.model)
            assert process.wait(WAIT_SEC) == 0, (place.home / "job.log").read_text()[-3000:]
        finally:
            process.kill()
            process.wait()
    [job] = place.store.list_jobs()
    assert place.tokens(job.job_id) == expected


def test_a_job_from_before_fingerprints_goes_on_with_whatever_is_there(place: Place) -> None:
    call = place.job("out", "--local", "--idempotency-key", KEY)
    job_id = place.killed_in_the_middle(*call)
    place.sql("UPDATE jobs SET model_fingerprint = 'unknown', model_parts = NULL")
    alter_weights(place.model)
    again = place.run(*call)
    assert again.returncode == 0, again.stderr[-3000:]
    assert len(place.tokens(job_id)) == ROWS


def test_a_spec_names_the_model_that_it_wants(place: Place) -> None:
    wanted = "0123456789abcdef" * 2
    spec = place.home / "job.yaml"
    spec.write_text(f"model_fingerprint: {wanted}\n")
    said = complaint(place.run("submit-job", str(spec), *place.job("out", "--local")[1:]))
    assert f"the job's is {wanted[:12]})" in said
    assert place.done() == 0
    spec.write_text("model_fingerprint: latest\n")
    assert "model_fingerprint" in complaint(
        place.run("submit-job", str(spec), *place.job("other", "--local")[1:])
    )


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_a_draft_model_counts_where_outputs_depend_on_it(place: Place, verification: str) -> None:
    draft = tiny_llama(place.home / "draft", vocab_size=300, hidden=32, layers=1, seed=1)
    more = ("--proposer", str(draft), "--verification", verification, "--depth", "2")
    call = place.job("out", "--local", "--idempotency-key", KEY, *more)
    place.killed_in_the_middle(*call)
    alter_weights(draft)
    again = place.run(*call)
    if verification == "coupled":
        assert again.returncode == 0, again.stderr[-3000:]
    else:
        assert f"draft model `{draft}` has other files" in complaint(again)
        assert place.done() < ROWS


class Fleet:
    """Workers of one store and one Redis, who find the model under one name."""

    def __init__(self, place: Place, redis_url: str, stack: ExitStack) -> None:
        self._stack = stack
        self.place = place
        place.environment |= {
            "SPECBATCH_BROKER_URL": redis_url,
            "SPECBATCH_LEASE_SEC": "3",
            "SPECBATCH_SWEEP_INTERVAL_SEC": "0.5",
        }
        self.others = [self.start(kind) for kind in ("ingest", "record")]

    def start(self, kind: str, *arguments: str, name: str = "") -> WorkerProcess:
        return self._stack.enter_context(
            worker(
                kind,
                *arguments,
                environment=self.place.environment,
                cwd=self.place.home,
                name=name,
            )
        )

    def verifier(self, name: str) -> WorkerProcess:
        return self.start(
            "verify", "--verifier", str(self.place.model), "--concurrency", "1", name=name
        )

    def submit(self, output: str) -> str:
        return str(self.command(*self.place.job(output))["job"])

    def command(self, *arguments: str) -> dict[str, Any]:
        return command(*arguments, environment=self.place.environment, cwd=self.place.home)

    def ended(self, job_id: str) -> bool:
        return self.place.store.get_job(job_id).state.is_final


def test_workers_with_different_weights_leave_each_other_s_jobs_alone(
    place: Place, redis_url: str, expected: dict[int, tuple[int, ...]]
) -> None:
    with ExitStack() as stack:
        fleet = Fleet(place, redis_url, stack)
        former = fleet.verifier("former")
        first = fleet.submit("first")
        alive = [former, *fleet.others]
        wait_until("some rows are recorded", lambda: place.done() > 0, alive)
        kept = shutil.copy(place.model / "model.safetensors", place.home)
        alter_weights(place.model)
        later = fleet.verifier("later")
        second = fleet.submit("second")
        alive.append(later)
        wait_until("both jobs' end", lambda: fleet.ended(first) and fleet.ended(second), alive)
        assert place.tokens(first) == expected
        altered = place.tokens(second)
        differing = [row for row in expected if expected[row] != altered[row]]
        assert len(differing) > ROWS // 2, "the weights did change"

        later.kill()
        third = fleet.submit("third")
        alive.remove(later)
        wait_until("it is missed", lambda: fleet.command("specbatch", "show", third)["waits_for"])
        told = fleet.command("specbatch", "show", third)
        wanted, here = told["model_fingerprint"], *told["workers"].values()
        assert told["waits_for"].startswith(
            f"waits for a worker with model fingerprint {wanted[:12]}; alive: "
        )
        assert told["waits_for"].endswith(f" with {here[:12]} (other weights)")
        [job] = fleet.command("specbatch", "top")["jobs"]
        assert (job["waits"], job["model_fingerprint"]) == (told["waits_for"], wanted)

        moved = fleet.command("specbatch", "retry", third, "--accept-model")
        assert moved["units"] == ROWS // GROUP
        wait_until("the third job's end", lambda: fleet.ended(third), alive)
        assert place.tokens(third) == expected

        shutil.copy(kept, place.model / "model.safetensors")
        spec = place.home / "job.yaml"
        spec.write_text(f"model_fingerprint: {wanted}\n")
        said = place.run("submit-job", str(spec), *place.job("fourth")[1:])
        assert said.returncode == 0, said.stderr[-2000:]
        assert f"waits for a worker with model fingerprint {wanted[:12]}" in said.stderr
        fourth = said.stdout.strip()
        wait_until(
            "its input is given back",
            lambda: fleet.command("specbatch", "show", fourth)["given_back"],
            alive,
        )
        told = fleet.command("specbatch", "show", fourth)
        assert f"the job's is {wanted[:12]})" in told["given_back"]
        fifth = fleet.submit("fifth")
        wait_until("the fifth job's end", lambda: fleet.ended(fifth), alive)
        assert place.tokens(fifth) == expected
