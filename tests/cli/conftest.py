"""Commands run in this process, on tiny models, each test in a folder of its own."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbatch.jobs.cli.main import main
from support.databases import migrated
from support.models import TinyPair


@dataclass(frozen=True)
class Called:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The last line of stdout."""
        return orjson.loads(self.out.strip().splitlines()[-1])

    @property
    def complaint(self) -> str:
        """The one `error:` line."""
        (line,) = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert "Traceback" not in self.err
        return line.removeprefix("error: ")


Cli = Callable[..., Called]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with `prompts.parquet` (12 good rows) and a migrated database in it."""
    monkeypatch.chdir(tmp_path)
    migrated(tmp_path / "specbatch-data" / "specbatch.db")
    write(tmp_path / "prompts.parquet", [f"def f{i}(x):" for i in range(12)])
    return tmp_path


@pytest.fixture
def cli(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """`cli("jobs", "--json")` runs `specbatch jobs --json`."""
    assert folder.is_dir()

    def call(*arguments: object) -> Called:
        monkeypatch.setattr(sys, "argv", ["specbatch", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        code = left.value.code
        return Called(
            code if isinstance(code, int) else int(bool(code)), captured.out, captured.err
        )

    return call


def run_in(folder: Path, *arguments: object, **environment: str) -> Called:
    """`specbatch ARGUMENTS` in a folder that several tests share."""
    out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["specbatch", *map(str, arguments)])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as left:
            main()
    code = left.value.code
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return Called(code if isinstance(code, int) else int(bool(code)), *texts)


def called_in(folder: Path, *arguments: object, **environment: str) -> Called:
    """The same; its code is 0."""
    done = run_in(folder, *arguments, **environment)
    assert done.code == 0, done
    return done


@contextmanager
def undone(here: Path, copy: Path, patch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder that several tests share; what is done in it is undone at the end."""
    shutil.copytree(here, copy)
    patch.chdir(here)
    yield here
    patch.chdir(copy.parent)
    shutil.rmtree(here)
    shutil.copytree(copy, here)


def flags_of_a_job(pair: TinyPair) -> list[object]:
    return [
        "--input", "prompts.parquet", "--output", "out", "--max-tokens", 6,
        "--verifier", pair.verifier, "--proposer", pair.draft,
    ]  # fmt: skip


@pytest.fixture
def job(tiny_pair: TinyPair) -> list[object]:
    """Flags of a small job on the tiny pair; more flags may follow and win."""
    return flags_of_a_job(tiny_pair)


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `folder`, for all tests of a file: what several of them read is made there once."""
    path = tmp_path_factory.mktemp("shared")
    migrated(path / "specbatch-data" / "specbatch.db")
    write(path / "prompts.parquet", [f"def f{i}(x):" for i in range(12)])
    return path


@pytest.fixture
def bad_rows(folder: Path) -> Path:
    """Eight rows: a null, an empty prompt and a doubled id among them."""
    prompts = ["a", None, "", "b", "c", "d", "e", "f"]
    return write(folder / "bad.parquet", prompts, ids=["0", "1", "2", "3", "3", "5", "6", "7"])


def write(path: Path, prompts: list[Any], ids: list[str] | None = None) -> Path:
    """A Parquet file of ids, prompts and a column of numbers."""
    ids = ids or [f"row-{i}" for i in range(len(prompts))]
    numbers = list(range(len(prompts)))
    pq.write_table(pa.table({"id": ids, "prompt": prompts, "number": numbers}), path)
    return path


@pytest.fixture
def s3_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers where the S3 store should be."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "very-secret")
    monkeypatch.setenv("SPECBATCH_S3_ENDPOINT_URL", "http://127.0.0.1:9")
