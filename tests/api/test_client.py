"""`specbatch.submit`, `Client` and `Job` with a broker, a worker and real models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from api.conftest import settings_of

import specbatch
from specbatch.pipeline.bootstrap import make_client, make_store
from specbatch.workers.lifecycle import embedded
from support.models import TinyPair

pytestmark = pytest.mark.pipeline  # a broker, models

PROMPTS = [f"def f{i}(x):" for i in range(12)]
Options = dict[str, Any]


@pytest.fixture
def job(tiny_pair: TinyPair, folder: Path) -> Options:
    """Options of a small job on the tiny pair, whose prompts are in the folder."""
    pq.write_table(pa.table({"prompt": PROMPTS, "n": range(12)}), folder / "prompts.parquet")
    return {"model": tiny_pair.verifier, "draft_model": tiny_pair.draft, "max_tokens": 6}


@pytest.fixture
def broker(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SPECBATCH_BROKER_URL", redis_url)
    return redis_url


@contextmanager
def worker(pair: TinyPair, folder: Path, broker: str) -> Iterator[None]:
    """A worker of all kinds, on the same broker and store."""
    settings = settings_of(folder).model_copy(update={"broker_url": broker})
    with embedded(settings, str(pair.verifier), str(pair.draft)):
        yield


def test_a_job_is_submitted_waited_for_and_looked_at(
    folder: Path, job: Options, broker: str, tiny_pair: TinyPair, capsys: Any
) -> None:
    submitted = specbatch.submit("prompts.parquet", output="out", name="mine", **job)
    assert submitted.status == "queued"
    assert submitted.name == "mine"
    with pytest.raises(specbatch.OutputError, match="is queued and has no results"):
        submitted.results()
    with worker(tiny_pair, folder, broker):
        assert submitted.wait() is submitted
    assert "12/12 prompts" in capsys.readouterr().err
    assert submitted.status == "done"
    assert submitted.progress().rows_done == 12
    assert submitted.outcome().data_uri == str(folder / "out" / "data")
    here = specbatch.run("prompts.parquet", output="here", progress=False, **job)
    assert submitted.results()["text"] == pq.read_table(here)["text"]
    report = submitted.report(samples=2)
    assert submitted.id in report.html
    assert report.save().name == f"report-{submitted.id}.html"
    assert "<iframe" in report._repr_html_()
    assert submitted.id in repr(submitted)
    assert "12 of 12" in submitted._repr_html_()


def test_a_frame_is_submitted_and_its_columns_come_back(
    folder: Path, job: Options, broker: str, tiny_pair: TinyPair
) -> None:
    frame = pd.DataFrame({"prompt": PROMPTS, "label": range(12)}, index=range(12, 0, -1))
    submitted = specbatch.submit(frame, **job)
    (file,) = (folder / "specbatch-data" / "frames").rglob("prompts.parquet")
    written = file.stat().st_mtime_ns
    assert specbatch.submit(frame, **job).id == submitted.id, "it has not ended"
    assert file.stat().st_mtime_ns == written, "the job reads it again for the columns to keep"
    with worker(tiny_pair, folder, broker):
        submitted.wait(progress=False)
    done = submitted.results().to_pandas()
    assert done["label"].tolist() == list(range(12))
    assert done["prompt"].tolist() == PROMPTS
    assert done["text"].notna().all()
    assert specbatch.submit(frame, **job).id != submitted.id


def test_a_column_that_the_output_has_is_refused_before_a_job_is_made(
    folder: Path, job: Options, broker: str
) -> None:
    assert broker
    frame = pd.DataFrame({"text": PROMPTS})
    with pytest.raises(specbatch.InputError, match="column `text` of the data cannot be kept"):
        specbatch.submit(frame, prompt_column="text", **job)
    assert specbatch.submit(frame, prompt_column="text", keep_columns=[], **job).status == "queued"
    assert len(specbatch.Client().jobs()) == 1
    assert folder.is_dir()


def test_a_job_is_found_by_id_prefix_name_and_latest(job: Options, broker: str) -> None:
    first = specbatch.submit("prompts.parquet", output="a", name="first", **job)
    second = specbatch.submit("prompts.parquet", output="b", name="second", **job)
    with specbatch.Client(broker_url=broker) as client:
        assert [one.id for one in client.jobs()] == [second.id, first.id]
        assert [one.id for one in client.jobs(1)] == [second.id]
        assert client.jobs(state="done") == []
        for which in (first.id, first.id[:16], "first"):
            assert client.job(which).id == first.id
        assert client.job("latest").id == second.id
        with pytest.raises(specbatch.JobNotFoundError):
            client.job("nothing-like-it")
        with pytest.raises(specbatch.UsageError, match="name one of queued, running"):
            client.jobs(state="ended")


def test_a_job_is_cancelled_and_its_rest_retried(
    folder: Path, job: Options, broker: str, tiny_pair: TinyPair
) -> None:
    submitted = specbatch.submit("prompts.parquet", output="out", **job)
    with pytest.raises(specbatch.UsageError, match="is still queued"):
        submitted.retry()
    submitted.cancel("enough for today")
    with worker(tiny_pair, folder, broker):
        assert submitted.wait(progress=False).status == "cancelled"
        assert submitted.outcome().stop_reason == "enough for today"
        assert submitted.retry() > 0
        assert submitted.wait(progress=False).status == "done"
    assert submitted.results().num_rows == 12


def test_a_wait_that_is_too_short_leaves_the_job(job: Options, broker: str) -> None:
    assert broker
    submitted = specbatch.submit("prompts.parquet", output="out", **job)
    with pytest.raises(specbatch.WaitTimeoutError, match="it keeps running"):
        submitted.wait(timeout=0, progress=False)
    assert submitted.status == "queued"


def test_ctrl_c_ends_the_waiting_and_not_the_job(
    job: Options, broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert broker
    submitted = specbatch.submit("prompts.parquet", output="out", **job)

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specbatch.pipeline.runtime.client.time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        submitted.wait()
    assert submitted.status == "queued"


def test_a_job_of_a_dead_process_is_interrupted(folder: Path, job: Options) -> None:
    with pytest.raises(specbatch.WaitTimeoutError):
        specbatch.run("prompts.parquet", output="out", timeout=0, **job)
    left = specbatch.Client().job("latest")
    assert left.status in ("queued", "interrupted")
    assert specbatch.run("prompts.parquet", output="out", **job) == str(folder / "out" / "data")
    assert left.status == "done"


def test_a_broker_that_reaches_nobody_is_refused(job: Options) -> None:
    with pytest.raises(specbatch.UsageError, match="memory://"):
        specbatch.submit("prompts.parquet", output="out", **job)
    with pytest.raises(specbatch.SpecbatchError, match="check SPECBATCH_BROKER_URL"):
        specbatch.Client(broker_url="redis://127.0.0.1:9/0").submit(
            "prompts.parquet", output="out", **job
        )


def test_a_store_is_named_by_its_url(tmp_path: Path, job: Options, broker: str) -> None:
    url = f"sqlite:///{tmp_path / 'other.db'}"
    with specbatch.Client(url, broker, workspace=str(tmp_path / "w")) as client:
        submitted = client.submit("prompts.parquet", output="out", **job)
        assert [one.id for one in client.jobs()] == [submitted.id]
    assert specbatch.Client().jobs() == []
    settings = settings_of(tmp_path).model_copy(update={"database_url": url})
    with closing(make_store(settings)) as store:
        found = make_client(settings, lambda _work: None, store).job(submitted.id)
    assert found.spec["verifier"] == str(job["model"])
