"""A batch from upload to download through OpenAI's own client, on a model that is run."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from openai.types import Completion, FileContent
from openai.types.chat import ChatCompletion
from serve.conftest import URL, Served, jsonl, line, serving

from specbatch.jobs.serve.collecting import Stop, why_stopped
from specbatch.jobs.serve.models import ServedModel
from specbatch.jobs.serve.runner import Runner
from specbatch.pipeline.ledger.rules import reason_to_stop
from specbatch.schemas.errors import StoreError, UsageError
from specbatch.schemas.records import JobState, Stage
from support.models import TinyPair


@pytest.fixture
def running(tmp_path: Path, tiny_pair: TinyPair) -> Iterator[Served]:
    values = {
        "verifier": str(tiny_pair.verifier),
        "proposer": str(tiny_pair.draft),
        "sampling": {"max_tokens": 6},
        "engine": {"dtype": "float32"},
    }
    with serving(tmp_path / "dir", {"small": ServedModel("small", values, tmp_path)}) as found:
        yield found


def runner_of(served: Served) -> Runner:
    service = served.service
    return Runner(served.settings, service.store, service.client, service.file_store.service_id)


def run_until_idle(served: Served) -> None:
    """Take steps, and do jobs here, until no batch is open."""
    one = runner_of(served)
    while served.open_batches():
        served.reconciler.step_all()
        one.run_next()


def test_a_batch_from_upload_to_download(running: Served) -> None:
    client = running.client()
    content = jsonl(
        line("a"),
        line("b", temperature=0.8, seed=7, n=2),
        line("bad", frequency_penalty=99),
        line("c", response_format={"type": "json_object"}, max_tokens=40),
    )
    file = client.files.create(file=("mine.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h",
        metadata={"night": "monday"},
    )  # fmt: skip
    assert batch.status == "validating"
    run_until_idle(running)
    done = client.batches.retrieve(batch.id)
    assert done.status == "completed"
    assert done.model == "small"
    assert done.metadata == {"night": "monday"}
    assert done.request_counts is not None
    assert done.request_counts.to_dict() == {"total": 4, "completed": 3, "failed": 1}
    assert done.output_file_id is not None
    assert done.error_file_id is not None
    answers = [orjson.loads(one) for one in client.files.content(done.output_file_id).iter_lines()]
    assert [answer["custom_id"] for answer in answers] == ["a", "b", "c"]
    bodies = [ChatCompletion.model_validate(answer["response"]["body"]) for answer in answers]
    assert [len(body.choices) for body in bodies] == [1, 2, 1]
    assert {body.model for body in bodies} == {"small"}  # not its folder
    (refused,) = client.files.content(done.error_file_id).iter_lines()
    assert orjson.loads(refused)["custom_id"] == "bad"
    assert orjson.loads(refused)["error"]["code"] == "bad_parameter"
    own = done.to_dict()["specbatch"]
    assert own["rows_done"] == 4  # type: ignore[index]  # an extra field is an object
    assert own["cost_usd"] > 0  # type: ignore[index]  # the same


def created(served: Served, content: bytes, url: str = URL) -> Any:
    client = served.client()
    file = client.files.create(file=content, purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")  # type: ignore[arg-type]  # one that the client's list has


def ended(served: Served, batch_id: str) -> tuple[Any, list[Any], list[Any]]:
    """A batch after its end, and the lines of both files."""
    run_until_idle(served)
    client = served.client()
    batch = client.batches.retrieve(batch_id)
    files = (batch.output_file_id, batch.error_file_id)
    lines = [list(client.files.content(i).iter_lines()) if i else [] for i in files]
    return batch, *([orjson.loads(one) for one in some] for some in lines)  # type: ignore[return-value]  # two of them


def test_a_batch_of_plain_texts(running: Served) -> None:
    url = "/v1/completions"
    requests = [
        {**line(name), "url": url, "body": {"model": "small", "prompt": prompt, "n": 2}}
        for name, prompt in (("text", "def area("), ("ids", [1, 2, 3]))
    ]
    batch, done, refused = ended(running, created(running, jsonl(*requests), url).id)
    assert (batch.status, refused) == ("completed", [])
    answers = [Completion.model_validate(one["response"]["body"]) for one in done]
    assert [len(answer.choices) for answer in answers] == [2, 2]
    so_far = running.client().get(f"/batches/{batch.id}/results", cast_to=FileContent)
    assert [orjson.loads(one) for one in so_far.splitlines()] == done


def test_a_batch_without_a_good_request_is_completed(running: Served) -> None:
    batch, done, refused = ended(running, created(running, jsonl(line("a", top_k=-5))).id)
    assert (batch.status, done) == ("completed", [])
    assert batch.request_counts.to_dict() == {"total": 1, "completed": 0, "failed": 1}
    assert [one["error"]["code"] for one in refused] == ["bad_parameter"]


def test_a_batch_that_is_cancelled_says_so_in_its_lines(running: Served) -> None:
    batch = created(running, jsonl(line("a"), line("b")))
    running.reconciler.step_all()
    running.client().batches.cancel(batch.id)
    batch, done, refused = ended(running, batch.id)
    assert (batch.status, done) == ("cancelled", [])
    assert batch.cancelled_at is not None
    assert {one["error"]["code"] for one in refused} == {"batch_cancelled"}
    assert batch.request_counts.failed == 0


def test_a_batch_whose_window_ends_is_expired(running: Served) -> None:
    batch = created(running, jsonl(line("a")))
    running.reconciler.step_all()
    with sqlite3.connect(running.settings.store_url.removeprefix("sqlite:///")) as database:
        database.execute("UPDATE jobs SET deadline_at = created_at - 1")
    batch, done, refused = ended(running, batch.id)
    assert (batch.status, done) == ("expired", [])
    assert batch.expired_at is not None
    assert [one["error"]["code"] for one in refused] == ["batch_expired"]


def test_a_model_that_cannot_be_run_fails_the_batch_and_not_the_next(
    running: Served, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(running.service.models["small"].values["verifier"], broken)
    values = {**running.service.models["small"].values, "verifier": str(broken)}
    running.service.models["broken"] = ServedModel("broken", values, tmp_path)
    first = created(running, jsonl(line("a", model="broken")))
    second = created(running, jsonl(line("a")))
    (broken / "model.safetensors").write_bytes(b"no weights")
    failed, _, _ = ended(running, first.id)
    assert failed.status == "failed"
    (error,) = failed.errors.data
    assert error.code == "batch_failed"
    assert str(tmp_path) not in error.message
    assert failed.to_dict()["specbatch"]["job_state"] == "failed"
    assert running.client().batches.retrieve(second.id).status == "completed"


def test_a_batch_of_another_numeric_class_waits_and_says_why(
    running: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has done already must not be lost."""
    client = running.client()
    batch = created(running, jsonl(line("a")))
    running.reconciler.step_all()
    one = runner_of(running)

    def refuse(*_: object) -> None:
        raise UsageError("job is verified in another numeric class: run it on such a machine")

    with monkeypatch.context() as patched:
        patched.setattr("specbatch.jobs.serve.runner.run_job", refuse)
        assert one.run_next()
        assert not one.run_next()  # it is passed over from now on
    waiting = client.batches.retrieve(batch.id)
    assert waiting.status == "in_progress"
    own = waiting.to_dict()["specbatch"]
    assert "another numeric class" in own["waits_because"]  # type: ignore[index]  # an object
    done, _, _ = ended(running, batch.id)  # another runner takes it
    assert done.status == "completed"


def test_a_batch_that_was_passed_over_can_be_cancelled(
    running: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = running.client()
    batch = created(running, jsonl(line("a")))
    running.reconciler.step_all()
    one = runner_of(running)

    def refuse(*_: object) -> None:
        raise UsageError("another numeric class")

    monkeypatch.setattr("specbatch.jobs.serve.runner.run_job", refuse)
    one.run_next()
    client.batches.cancel(batch.id)
    one.run_next()
    cancelled = client.batches.retrieve(batch.id)
    assert cancelled.status == "cancelled"
    assert cancelled.to_dict()["specbatch"]["job_state"] == "cancelled"  # type: ignore[index]  # an object


def test_a_batch_that_was_passed_over_expires_with_its_job(
    running: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a runner that was killed holds one of its leases."""
    batch = created(running, jsonl(line("a")))
    running.reconciler.step_all()
    (job,) = running.store.list_jobs()
    assert running.store.claim_job(job.job_id, Stage.INGEST, "elsewhere:1", 600.0)
    one = runner_of(running)

    def refuse(*_: object) -> None:
        raise UsageError("another numeric class")

    monkeypatch.setattr("specbatch.jobs.serve.runner.run_job", refuse)
    one.run_next()
    with sqlite3.connect(running.service.file_store.root / "specbatch.db") as database:
        database.execute("UPDATE batches SET expires_at = created_at - 1")
    one.run_next()
    expired = running.client().batches.retrieve(batch.id)
    assert expired.status == "expired"
    assert expired.to_dict()["specbatch"]["job_state"] == "cancelled"  # type: ignore[index]  # an object


def test_an_operators_stop_has_its_own_words(running: Served) -> None:
    batch = created(running, jsonl(line("a")))
    running.reconciler.step_all()
    (job,) = running.store.list_jobs()
    running.service.client.cancel(job.job_id, "cancelled on request")
    batch, done, refused = ended(running, batch.id)
    assert (batch.status, done) == ("cancelled", [])
    assert [error.code for error in batch.errors.data] == ["stopped_by_operator"]
    assert [one["error"]["code"] for one in refused] == ["stopped_by_operator"]


def test_a_spent_budget_is_named() -> None:
    reason = reason_to_stop(False, None, 2.0, 1.0)
    batch = SimpleNamespace(cancelling_at=None)
    job = SimpleNamespace(state=JobState.CANCELLED, stop_reason=reason)
    assert why_stopped(batch, job) is Stop.BUDGET  # type: ignore[arg-type]  # what it reads of both
    assert why_stopped(SimpleNamespace(cancelling_at=1.0), job) is Stop.CLIENT  # type: ignore[arg-type]  # the same


def test_a_batchs_files_are_made_once_however_often_its_end_is_tried(
    running: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the disk of the store is full."""
    batch = created(running, jsonl(line("a")))
    running.reconciler.step_all()
    runner_of(running).run_next()
    (row,) = running.open_batches()

    def full(*_: object) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(type(running.store), "end_batch", full)
        for _ in range(3):
            with pytest.raises(StoreError):
                running.reconciler.step(row)
    batch, done, _ = ended(running, batch.id)
    assert len(done) == 1
    files = running.service.file_store.files
    assert {path.stem for path in files.iterdir()} == {batch.input_file_id, batch.output_file_id}


def test_deleting_an_output_deletes_the_jobs_copy_too(running: Served) -> None:
    batch, _, _ = ended(running, created(running, jsonl(line("a"))).id)
    published = running.service.file_store.output_of(batch.id) / "output.jsonl"
    assert published.exists()
    running.client().files.delete(batch.output_file_id)
    assert not published.exists()


def test_a_model_folder_that_is_away_for_a_moment_fails_nothing(
    running: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(running.service.models["small"].values["verifier"], model)
    values = {**running.service.models["small"].values, "verifier": str(model)}
    running.service.models["moved"] = ServedModel("moved", values, tmp_path)
    batch = created(running, jsonl(line("a", model="moved")))
    running.reconciler.step_all()
    model.rename(tmp_path / "elsewhere")
    one = runner_of(running)
    assert one.run_next()
    assert not one.run_next()  # not before some time has passed
    (tmp_path / "elsewhere").rename(model)
    monkeypatch.setattr("specbatch.jobs.serve.runner.AWAY_SEC", 0.0)
    done, _, _ = ended(running, batch.id)
    assert done.status == "completed"
