"""`specbatch export`: a file, one line about it, and one sentence where it cannot be."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
from cli.conftest import undone, write
from conftest import S3
from ledger.builders import JOB

from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.storage import objects
from specbatch.schemas.exports import ExportKind
from specbatch.schemas.settings import Settings
from support.databases import migrated
from support.exported import exported_job

COMPLETIONS = 32  # of `exported_job`


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job in its store that has ended."""
    return with_job(tmp_path_factory.mktemp("site"))


def with_job(folder: Path, has_ended: bool = True) -> Path:
    workspace = folder / "specbatch-data"
    migrated(workspace / "specbatch.db")
    write(folder / "prompts.parquet", ["a"])
    with closing(make_store(Settings(workspace=str(workspace)))) as store:
        exported_job(store, workspace / "jobs" / JOB, has_ended)
    return folder


@pytest.fixture
def folder(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder, with the ended job in it; what a test does there is undone."""
    with undone(site, tmp_path / "before", monkeypatch) as here:
        yield here


@pytest.fixture
def ended(folder: Path) -> str:
    """The id of the ended job."""
    assert folder.is_dir()
    return JOB


@pytest.mark.parametrize("kind", ExportKind)
def test_a_set_becomes_a_file_and_one_line(cli: Any, ended: str, kind: ExportKind) -> None:
    done = cli("export", ended, "--what", kind, "--to", f"{kind}.parquet")
    assert done.code == 0
    rows = pq.read_metadata(f"{kind}.parquet").num_rows
    assert rows >= (COMPLETIONS if kind not in (ExportKind.CORRECTIONS, ExportKind.TIME) else 1)
    (line,) = done.out.splitlines()
    assert line.startswith(f"{kind} of job {ended}: {rows:,} rows, ")
    assert line.endswith(f" in 1 file: {kind}.parquet")


def test_json_tells_of_each_file(cli: Any, ended: str) -> None:
    told = cli("export", ended[:8], "--what", "costs", "--to", "out/", "--json").json
    (file,) = told.pop("files")
    data = Path("out/costs/costs-00000.parquet").read_bytes()
    assert file == {
        "name": "costs/costs-00000.parquet",
        "rows": COMPLETIONS,
        "size_bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    assert told == {
        "job": ended,
        "what": "costs",
        "to": "out/",
        "rows": COMPLETIONS,
        "bytes": len(data),
        "left_out": {},
    }
    assert Path("out/costs-manifest.json").is_file()


def test_corrections_are_chosen_and_what_is_left_out_is_said(cli: Any, ended: str) -> None:
    flags = ["--tag", "de", "--proposer", "small", "--min-rejections", 1]
    done = cli("export", ended, "--what", "corrections", "--to", "c.parquet", *flags)
    table = pq.read_table("c.parquet").to_pylist()
    assert {row["tag"] for row in table} == {"de"}
    assert {name for row in table for name in row["rejected_proposers"]} == {"small"}
    assert "completions that have another tag" in done.err
    assert len(done.out.splitlines()) == 1


def test_what_is_there_is_refused_and_then_replaced(cli: Any, ended: str) -> None:
    export = ("export", ended, "--what", "costs", "--to", "c.parquet")
    assert cli(*export).code == 0
    refused = cli(*export)
    assert refused.code == 2
    assert "c.parquet exists already" in refused.complaint
    assert cli(*export, "--overwrite").code == 0


def test_a_job_that_goes_on_is_exported_so_far(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "running").mkdir()
    monkeypatch.chdir(with_job(tmp_path / "running", has_ended=False))
    export = ("export", JOB, "--what", "costs", "--to", "c.parquet")
    refused = cli(*export)
    assert refused.code == 2
    assert "is still running: wait for it" in refused.complaint
    done = cli(*export, "--so-far")
    assert done.code == 0
    assert "these are the rows finished so far" in done.err


WRONG = {
    "unknown set": (
        ["--what", "secrets"],
        "no export called 'secrets': --what is one of completions, tokens, corrections, costs, "
        "time",
    ),
    "choice of another set": (["--tag", "de"], "choose corrections; costs are exported whole"),
    "a file in place of a folder": (["--to", "prompts.parquet/x"], "cannot be"),
    "a folder that is a file": (["--to", "plain"], "plain is a file; name a folder"),
    "another's file": (["--to", "prompts.parquet"], "prompts.parquet exists already"),
    "an empty name": (["--to", ""], "--to is empty: name a file ending in .parquet, a folder or"),
    "a store that is only read": (["--to", "gs://bucket/x"], "gs:// is for inputs alone"),
    "unknown scheme": (["--to", "ftp://bucket/x"], "`ftp://` is not supported"),
    "no bucket": (["--to", "s3:///x"], "looks like s3://bucket/key"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_gets_one_sentence(cli: Any, folder: Path, ended: str, case: str) -> None:
    (folder / "plain").write_text("x")
    flags, message = WRONG[case]
    before = sorted(path.name for path in folder.iterdir())
    done = cli("export", ended, "--what", "costs", "--to", "c.parquet", *flags)
    assert done.code == 2
    assert message in done.complaint
    assert sorted(path.name for path in folder.iterdir()) == before


def test_an_unknown_job_is_told(cli: Any) -> None:
    done = cli("export", "no-such-job", "--what", "costs", "--to", "c.parquet")
    assert done.code == 2
    assert "no-such-job" in done.complaint


def test_a_negative_count_is_refused(cli: Any, ended: str) -> None:
    flags = ["--what", "corrections", "--to", "c.parquet", "--min-rejections", -1]
    assert cli("export", ended, *flags).code == 2


def test_an_export_to_s3(cli: Any, ended: str, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBATCH_S3_ENDPOINT_URL", s3.endpoint_url)
    done = cli("export", ended, "--what", "tokens", "--to", f"{s3.uri}/night", "--json")
    assert done.code == 0
    (file,) = done.json["files"]
    found = s3.client().get_object(Bucket=s3.bucket, Key=f"night/{file['name']}")
    assert hashlib.sha256(found["Body"].read()).hexdigest() == file["sha256"]
    listed = s3.client().get_object(Bucket=s3.bucket, Key="night/tokens-manifest.json")
    assert orjson.loads(listed["Body"].read())["files"] == [file]


@pytest.mark.usefixtures("s3_out_of_reach")
@pytest.mark.timeout(60)  # what a worker waits for is twice that
def test_an_s3_out_of_reach_is_told_in_seconds(
    cli: Any, ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert objects.ASKED_RETRY_SEC <= 10
    monkeypatch.setattr(objects, "ASKED_RETRY_SEC", 0.5)
    done = cli("export", ended, "--what", "costs", "--to", "s3://bucket/x.parquet")
    assert done.code == 2
    assert "export s3://bucket/x.parquet cannot be used" in done.complaint
    assert "127.0.0.1:9" in done.complaint
    assert "very-secret" not in done.err


@pytest.mark.long
def test_a_job_done_here_is_exported_as_its_output_has_it(cli: Any, job: list[object]) -> None:
    ran = cli("submit-job", *job, "--local", "--depth", 3, "--max-tokens", 24, "--json")
    assert ran.code == 0
    name = ran.json["job"]
    for kind in ExportKind:
        flags = ["--min-rejections", 0] if kind is ExportKind.CORRECTIONS else []
        assert cli("export", name, "--what", kind, "--to", f"{kind}.parquet", *flags).code == 0
    output = pq.read_table("out/data/part-00000.parquet").to_pylist()
    tokens = pq.read_table("tokens.parquet").to_pylist()
    learned = pq.read_table("corrections.parquet").to_pylist()
    costs = pq.read_table("costs.parquet").to_pylist()
    assert len(learned) == len(output) == 12
    for published, row, cost in zip(output, learned, costs, strict=True):
        mine = [token for token in tokens if token["row_index"] == published["row_index"]]
        assert [token["token_id"] for token in mine] == published["token_ids"] == row["token_ids"]
        assert len(row["prompt_ids"]) == published["prompt_tokens"]
        corrected = [token for token in mine if token["origin"] == "corrected"]
        assert [token["position"] for token in corrected] == row["rejected_positions"]
        assert [token["rejected_token"] for token in corrected] == row["rejected_tokens"]
        assert all(token["token_id"] != token["rejected_token"] for token in corrected)
        assert cost["cost_usd"] == published["cost_usd"] > 0
    assert any(row["rejected_tokens"] for row in learned)
    assert {name for row in learned for name in row["rejected_proposers"]}
