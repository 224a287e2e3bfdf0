"""`specbatch train`: a draft model from the store, and one sentence where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from cli.conftest import called_in, write

from specbatch.pipeline.learning import checkpoints
from specbatch.schemas.training import RECORD
from support import forks
from support.models import TinyPair, tiny_llama
from support.workers import WAIT_SEC, wait_until

pytestmark = pytest.mark.pipeline  # runs models

ROWS = 60


def teach(folder: Path, pair: TinyPair, rows: int = ROWS) -> list[object]:
    """A job of the pair has ended there; the beginning of a command that learns from it."""
    write(folder / "many.parquet", [f"def f{i}(x, y={i}):" for i in range(rows)])
    called_in(
        folder,
        *("submit-job", "--local", "--input", "many.parquet", "--output", "out"),
        *("--name", "taught", "--verifier", pair.verifier, "--proposer", pair.draft),
        *("--max-tokens", 24, "--top-logprobs", 4, "--dtype", "float32", "--temperature", 0),
    )
    return ["train", "--proposer", pair.draft, "--held-out", 0.4]


@pytest.fixture(scope="module")
def shared(shared_folder: Path, tiny_pair: TinyPair) -> tuple[Path, list[object]]:
    """For all tests that make no other job."""
    return shared_folder, teach(shared_folder, tiny_pair)


@pytest.fixture
def taught(
    cli: Any, shared: tuple[Path, list[object]], monkeypatch: pytest.MonkeyPatch
) -> list[object]:
    """In the folder where the job has ended. What a test writes goes to its own."""
    assert cli
    monkeypatch.chdir(shared[0])
    return shared[1]


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """Where a training writes."""
    return tmp_path / "new"


def test_a_job_s_outputs_make_a_better_draft_model(
    cli: Any,
    folder: Path,
    tiny_pair: TinyPair,
    taught: list[object],
    new: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = cli(*taught, "--out", new, "--steps", 60, "--learning-rate", 3e-3)
    assert done.code == 0, (done.out, done.err)
    assert "60 steps, best after" in done.out
    assert f"{new}: better than its parent" in "".join(done.out.splitlines())
    assert "step 60 of 60" in done.err
    record = orjson.loads((new / RECORD).read_bytes())
    assert [job["name"] for job in record["jobs"]] == ["taught"]
    assert record["data"]["with_top_logprobs"] == record["data"]["train"]["sequences"]
    monkeypatch.chdir(folder)
    served = cli(
        *("submit-job", "--local", "--input", "prompts.parquet", "--output", "served", "--json"),
        *("--verifier", tiny_pair.verifier, "--proposer", new, "--max-tokens", 8),
        *("--dtype", "float32", "--sources", "draft-model"),
    )
    assert served.code == 0


def test_a_model_that_learned_nothing_ends_with_3(
    cli: Any, taught: list[object], new: Path
) -> None:
    still = [*taught, "--out", new, "--steps", 1, "--learning-rate", 0, "--json"]
    done = cli(*still)
    assert done.code == 3
    assert done.json["held_out"]["accepted_length"]["difference"]["value"] == 0
    again = cli(*still)  # it has ended: the same answer, and nothing done
    assert (again.code, again.json) == (3, done.json)
    assert "step" not in again.err


def test_a_stopped_training_resumes_whatever_has_ended_since(
    cli: Any, folder: Path, tiny_pair: TinyPair
) -> None:
    """Also if more jobs ended meanwhile: the window is that of the first start."""
    taught = teach(folder, tiny_pair, rows=24)
    arguments = [*taught, "--out", "new", "--steps", 3000, "--learning-rate", 1e-5]
    log = folder / "log"
    with log.open("wb") as stream:
        process = forks.fork(
            *("specbatch", *map(str, arguments)),
            environment={},
            cwd=folder,
            stdout=stream,
            stderr=stream,
        )
        try:
            wait_until("a checkpoint is there", (folder / "new" / "checkpoint.pt").exists)
            process.terminate()
            process.wait(WAIT_SEC)
        finally:
            process.kill()
            process.wait()
    said = log.read_text()
    assert process.returncode == 130, said
    assert "interrupted: the same command resumes the training" in said
    more = ("submit-job", "--local", "--input", "prompts.parquet", "--output", "more")
    assert cli(*more, "--verifier", taught[2], "--max-tokens", 4).code == 0
    other = cli(*taught, "--out", "new", "--steps", 3000, "--learning-rate", 1e-4)
    assert other.code == 2
    assert other.complaint == (
        "--out new holds a training that differs in learning_rate: ask for the same, or name "
        "another folder"
    )


def test_jobs_of_another_verifier_than_the_newest_are_named_and_left_out(
    cli: Any, folder: Path, tiny_pair: TinyPair
) -> None:
    taught = teach(folder, tiny_pair, rows=12)
    other = cli(
        *("submit-job", "--local", "--input", "many.parquet", "--output", "o", "--name", "other"),
        *("--verifier", tiny_pair.draft, "--max-tokens", 4, "--dtype", "float32"),
    )
    assert other.code == 0
    export = [*taught, "--export", "speculators"]
    done = cli(*export, "--out", "newest")
    (line,) = [line for line in done.err.splitlines() if line.startswith("left out")]
    assert "(taught) has another verifier (" in line
    assert cli(*export, "--out", "named", "--job", "taught").code == 0
    jobs = [orjson.loads((folder / name / "dataset.json").read_bytes())["jobs"]
            for name in ("newest", "named")]  # fmt: skip
    assert [len(of) for of in jobs] == [1, 1]
    assert jobs[0] != jobs[1]


def test_the_data_set_can_be_written_for_another_trainer(
    cli: Any, taught: list[object], new: Path
) -> None:
    export = [*taught, "--out", new, "--export", "speculators"]
    done = cli(*export)
    assert done.code == 0
    rows = {
        name: [orjson.loads(line) for line in (new / name).read_bytes().splitlines()]
        for name in ("train.jsonl", "held-out.jsonl")
    }
    assert sum(map(len, rows.values())) == ROWS
    counts = ", ".join(f"{len(of):,} rows in {name}" for name, of in rows.items())
    assert "".join(done.out.splitlines()) == f"{new}: {counts}"
    for row in (row for of in rows.values() for row in of):
        assert list(row) == ["input_ids", "loss_mask"]
        assert len(row["input_ids"]) == len(row["loss_mask"])
        assert row["loss_mask"] == sorted(row["loss_mask"])
    again = cli(*export)
    assert again.complaint == f"--out {new} is not empty: name a folder that is new or empty"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--job", "nobody"], "nothing to learn from for tenant 'default': no job 'nobody'"),
        (["--tenant", "nobody"], "nothing to learn from for tenant 'nobody': 0 of its jobs"),
        (["--since", "0m"], "nothing to learn from for tenant 'default': "),
        (["--since", "yesterday"], "--since 'yesterday' is neither an age nor a time"),
        (["--device", "cuda:77"], "device `cuda:77` is not here"),
        (["--epochs", "inf"], "--epochs inf must be from 0.01 to 10,000"),
        (["--learning-rate", "inf"], "--learning-rate inf must be a finite number"),
        (["--out", "prompts.parquet"], "nothing can be written to prompts.parquet: "),
        (
            ["--out", "prompts.parquet", "--export", "speculators"],
            "--out prompts.parquet is a file: name a folder",
        ),
        (["--proposer", "nowhere/at/all"], "model folder `nowhere/at/all` does not exist"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    cli: Any, taught: list[object], new: Path, more: list[str], said: str
) -> None:
    done = cli(*taught, "--out", new, *more)
    assert done.code == 2
    assert done.complaint.startswith(said)


def test_two_trainings_at_once_in_one_folder(cli: Any, taught: list[object], new: Path) -> None:
    with checkpoints.locked(new / checkpoints.LOCK, "another folder"):
        done = cli(*taught, "--out", new)
    assert (done.code, done.complaint) == (
        2,
        f"another training writes to {new}: wait for it, or name another folder",
    )


def test_a_proposer_of_other_tokens_is_refused_by_the_job_s_name(
    cli: Any, taught: list[object], new: Path
) -> None:
    assert taught
    other = tiny_llama(new.with_name("other"), vocab_size=310, layers=1)
    done = cli("train", "--proposer", other, "--out", new, "--job", "taught")
    assert done.code == 2
    assert "(taught) has a verifier with other tokens than the proposer" in done.complaint


def test_a_tenant_who_is_private_now_is_refused(
    cli: Any, taught: list[object], new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBATCH_PRIVACY", "hash-only")
    monkeypatch.setenv("SPECBATCH_ENCRYPTION_KEY", "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=")
    done = cli(*taught, "--out", new)
    assert done.complaint == (
        "texts of tenant 'default' are kept hash-only: nothing is learned from them"
    )


def test_a_light_install_says_what_is_missing(folder: Path) -> None:
    blocked = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'pyarrow', 'numpy', 'transformers'))\n"
        "from specbatch.jobs.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", blocked, "train", "--proposer", "draft", "--out", "new"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "pip install 'specbatch[engine]'" in done.stderr
