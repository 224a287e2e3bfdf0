"""Batches: what is asked, what is refused, and how one looks; no model is run."""

from __future__ import annotations

import sqlite3
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from serve.conftest import KEY, URL, Served, jsonl, line, serving

from specbatch.jobs.serve.checking import check_file
from specbatch.jobs.serve.errors import without_places
from specbatch.jobs.serve.file_store import FileStore
from specbatch.jobs.serve.models import ServedModel
from specbatch.jobs.serve.reconciler import Reconciler
from specbatch.schemas.records import JobRow, JobState
from specbatch.schemas.serving import BatchPhase, BatchRow


def upload(client: openai.OpenAI, *lines: Any) -> str:
    return client.files.create(file=jsonl(*(lines or (line("a"),))), purpose="batch").id


def create(client: openai.OpenAI, file_id: str, **more: Any) -> Any:
    values = {"endpoint": URL, "completion_window": "24h", **more}
    return client.batches.create(input_file_id=file_id, **values)


def test_a_batch_becomes_one_job(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    client = served.client()
    batch = create(client, upload(client, line("a"), line("b")))
    assert batch.expires_at - batch.created_at == 86_400
    served.reconciler.step_all()
    served.reconciler.step_all()
    (job,) = served.store.list_jobs()
    begins = f"batch {batch.id} of tenant default begins: job {job.job_id}, 2 requests of model"
    assert caplog.text.count(begins) == 1
    seen = client.batches.retrieve(batch.id)
    assert (seen.status, seen.model) == ("in_progress", "small")
    assert seen.request_counts.total == 2  # type: ignore[union-attr]  # always there
    assert seen.to_dict()["specbatch"]["job_id"] == job.job_id  # type: ignore[index]  # an object
    assert job.spec["input"]["format"] == "openai"
    assert job.tenant == "default"


def test_a_step_that_was_cut_off_is_done_again(served: Served) -> None:
    """As after kill -9 between any two writes of a step."""
    client = served.client()
    create(client, upload(client))
    (batch,) = served.open_batches()
    served.reconciler.step(batch)
    served.reconciler.step(batch)  # from what it was before
    begun = served.store.begin_batch(batch.batch_id, "small", 1)
    assert begun.phase is BatchPhase.RUNNING
    assert len(served.store.list_jobs()) == 1


def test_the_same_idempotency_key_gives_the_same_batch(served: Served) -> None:
    client = served.client(max_retries=0)
    file_id = upload(client)
    again = {"extra_headers": {"Idempotency-Key": "night-1"}}
    first, second = create(client, file_id, **again), create(client, file_id, **again)
    assert first.id == second.id
    assert len(client.batches.list().data) == 1
    with pytest.raises(openai.ConflictError) as caught:
        create(client, file_id, completion_window="48h", **again)
    assert caught.value.code == "idempotency_key_in_use"
    other = served.client(served.key("other"))
    assert create(other, upload(other), **again).id != first.id


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line("a"), b"{"], "invalid_json_line", 2),
        ([b"[" * 5000 + b"]" * 5000], "invalid_json_line", 1),
        ([line("a"), line("a")], "duplicate_custom_id", 2),
        ([b"\n", b"[", b"{},", b"]"], "invalid_json_line", 3),
        ([[line("a"), line("b")]], "invalid_json_line", 1),
        ([{**line("a"), "custom_id": None}], "missing_custom_id", 1),
        ([{**line("a"), "custom_id": 1}], "invalid_custom_id", 1),
        ([line("a", model=None)], "missing_model", 1),
        ([{**line("a"), "method": "GET"}], "mismatched_endpoint", 1),
        ([{**line("a"), "url": "/v1/embeddings"}], "mismatched_endpoint", 1),
        ([{**line("a"), "url": "http://169.254.169.254/"}], "mismatched_endpoint", 1),
        ([line("a"), line("b", model="org/large")], "mismatched_model", 2),
        ([line("a", model="../../models/verifier")], "model_not_found", 1),
        ([{**line("a"), "body": []}], "invalid_request", 1),
        ([b"\n"], "empty_file", None),
        ([line(str(i)) for i in range(101)], "too_many_requests", None),
        ([b"" for _ in range(101)], "too_many_requests", None),
        ([line("a", model=["x"] * 100)], "model_not_found", 1),
    ],
)
def test_a_file_that_is_no_batch_fails_it(
    served: Served, lines: list[Any], code: str, number: int | None
) -> None:
    client = served.client()
    raw = b"".join(
        one + b"\n" if isinstance(one, bytes) else orjson.dumps(one) + b"\n" for one in lines
    )
    file = client.files.create(file=raw, purpose="batch")
    batch = create(client, file.id)
    served.reconciler.step_all()
    failed = client.batches.retrieve(batch.id)
    assert failed.status == "failed"
    assert failed.failed_at is not None
    assert failed.errors is not None
    (error,) = failed.errors.data or []
    assert (error.code, error.line) == (code, number)
    assert served.store.list_jobs() == []


def test_a_line_that_is_not_utf8_says_so(tmp_path: Path) -> None:
    path = tmp_path / "latin"
    path.write_bytes('{"custom_id": "é"}'.encode("latin-1"))
    found = check_file(path, URL, {"small"}, 10)
    assert found is not None
    assert [error["message"] for error in found.errors] == [
        "this line is not UTF-8: save the file as UTF-8"
    ]


def test_a_file_that_was_changed_on_the_disk_fails_its_batch(served: Served) -> None:
    client = served.client()
    file_id = upload(client)
    batch = create(client, file_id)
    served.service.file_store.path_of(file_id).write_bytes(jsonl(line("b")))
    served.reconciler.step_all()
    failed = client.batches.retrieve(batch.id)
    assert failed.status == "failed"
    assert failed.errors is not None
    assert [error.code for error in failed.errors.data or []] == ["file_changed"]
    assert served.store.list_jobs() == []


def test_the_check_of_a_long_file_ends_with_its_batch_and_with_the_service(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = served.client()
    served.reconciler.most_requests = 10_000
    batch = create(client, upload(client, *[line(str(i)) for i in range(3000)]))
    looked: list[str] = []
    read = served.store.batch

    def look(tenant: str, batch_id: str) -> BatchRow | None:
        if not looked:
            served.store.cancel_batch(tenant, batch_id)
        looked.append(batch_id)
        return read(tenant, batch_id)

    with monkeypatch.context() as patched:
        patched.setattr(served.store, "batch", look)
        served.reconciler.step_all()
    assert looked == [batch.id] * 2  # it read no further, and then what had become of it
    assert client.batches.retrieve(batch.id).status == "cancelled"
    later = create(client, batch.input_file_id)
    (row,) = served.open_batches()
    served.reconciler.close()
    served.reconciler.step(row)
    assert client.batches.retrieve(later.id).status == "validating"


def test_what_a_batch_says_of_its_lines_is_encrypted_and_quotes_no_private_words(
    tmp_path: Path,
) -> None:
    models = {"small": ServedModel("small", {"verifier": "models/small"}, tmp_path)}
    keyed = {"tenant_privacy": {"private": "redacted"}, "encryption_key": KEY}
    with serving(tmp_path / "dir", models, more_settings=keyed) as served:
        said = {}
        for tenant in ("default", "private"):
            client = served.client(served.key(tenant))
            batch = create(client, upload(client, line("a", model="secret")))
            served.reconciler.step_all()
            errors = client.batches.retrieve(batch.id).errors
            assert errors is not None
            (error,) = errors.data or []
            assert error.code == "model_not_found"
            said[tenant] = str(error.message)
        assert "'secret'" in said["default"]
        assert "secret" not in said["private"]
        with sqlite3.connect(tmp_path / "dir" / "specbatch.db") as connection:
            kept = connection.execute("SELECT errors FROM batches").fetchall()
        assert "model" not in str(kept)


def test_a_batch_is_cancelled_before_and_after_it_has_a_job(served: Served) -> None:
    client = served.client()
    early = create(client, upload(client))
    assert client.batches.cancel(early.id).status == "cancelled"
    late = create(client, upload(client))
    served.reconciler.step_all()
    assert client.batches.cancel(late.id).status == "cancelling"
    (job,) = served.store.list_jobs()
    assert job.cancel_requested
    assert client.batches.cancel(early.id).status == "cancelled"


def test_a_cancelled_batch_without_a_job_ends_at_once(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the service was killed before it submitted the job."""
    caplog.set_level("INFO")
    client = served.client()
    batch = create(client, upload(client))
    served.store.begin_batch(batch.id, "small", 1)
    served.store.cancel_batch("default", batch.id)
    served.reconciler.step_all()
    assert client.batches.retrieve(batch.id).status == "cancelled"
    assert f"batch {batch.id} of tenant default ends: cancelled" in caplog.text
    assert served.store.list_jobs() == []


def test_a_request_to_cancel_reaches_a_job_that_was_not_noted(served: Served) -> None:
    """Where the service was killed between the job and its note."""
    client = served.client()
    batch = create(client, upload(client))
    (row,) = served.open_batches()
    begun = served.store.begin_batch(batch.id, "small", 1)
    served.reconciler.step(begun)
    served.store.note_batch_job(row.batch_id, None)  # type: ignore[arg-type]  # as before the note
    served.store.cancel_batch("default", batch.id)
    served.reconciler.step_all()
    (job,) = served.store.list_jobs()
    assert job.cancel_requested
    assert job.state is not JobState.DONE


def test_a_job_gets_what_is_left_of_the_window(served: Served) -> None:
    client = served.client()
    create(client, upload(client))
    (batch,) = served.open_batches()
    late = replace(served.store.begin_batch(batch.batch_id, "small", 1), expires_at=time.time() + 9)
    served.reconciler.step(late)
    (job,) = served.store.list_jobs()
    assert job.deadline_at is not None
    assert job.deadline_at - job.created_at < 9.5


def test_a_batch_whose_window_ends_before_it_has_a_job_is_expired(served: Served) -> None:
    client = served.client()
    created = create(client, upload(client))
    begun = served.store.begin_batch(created.id, "small", 1)
    served.reconciler.step(replace(begun, expires_at=time.time() - 1))
    assert client.batches.retrieve(created.id).status == "expired"
    assert served.store.list_jobs() == []


def test_another_service_on_the_store_leaves_a_batch_alone(served: Served, tmp_path: Path) -> None:
    client = served.client()
    batch = create(client, upload(client))
    other = FileStore(tmp_path / "other")
    other.make()
    beside = replace_field(served.reconciler, other)
    beside.step_all()
    assert client.batches.retrieve(batch.id).status == "validating"
    served.reconciler.step_all()
    assert client.batches.retrieve(batch.id).status == "in_progress"
    other.make()
    assert FileStore(tmp_path / "other").service_id == other.service_id  # made once


def replace_field(reconciler: Reconciler, file_store: FileStore) -> Reconciler:
    r = reconciler
    return Reconciler(r.store, r.client, file_store, r.models, r.most_requests)


def test_a_batch_that_raises_does_not_keep_newer_ones(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = served.client()
    first, second = create(client, upload(client)), create(client, upload(client))
    step = served.reconciler.step

    def fails(batch: BatchRow, job: JobRow | None) -> None:
        assert batch.batch_id != first.id, "a bug"
        step(batch, job)

    monkeypatch.setattr(Reconciler, "step", lambda _, batch, job: fails(batch, job))
    served.reconciler.step_all()
    assert client.batches.retrieve(second.id).status == "in_progress"
    assert f"batch {first.id} waits: a bug" in caplog.text


def test_a_job_that_is_refused_fails_its_batch_with_the_sentence(tmp_path: Path) -> None:
    values = {"verifier": "models/small", "reuse_outputs": True}
    models = {"small": ServedModel("small", values, tmp_path)}
    private = {"tenant_privacy": {"default": "hash-only"}, "encryption_key": KEY}
    with serving(tmp_path / "dir", models, more_settings=private) as served:
        client = served.client()
        batch = create(client, upload(client))
        served.reconciler.step_all()
        failed = client.batches.retrieve(batch.id)
        assert failed.status == "failed"
        assert failed.errors is not None
        (error,) = failed.errors.data or []
        assert error.message is not None
        assert error.message.startswith("reuse_outputs needs texts that are kept in full")


def test_a_private_tenants_words_are_stored_as_its_privacy_says(
    tmp_path: Path,
) -> None:
    models = {"small": ServedModel("small", {"verifier": "models/small"}, tmp_path)}
    private = {"tenant_privacy": {"default": "hash-only"}, "encryption_key": KEY}
    with serving(tmp_path / "dir", models, more_settings=private) as served:
        client = served.client()
        file = client.files.create(file=("secret.jsonl", jsonl(line("a"))), purpose="batch")
        more = {"metadata": {"secret": "word"}, "extra_headers": {"Idempotency-Key": "secret-1"}}
        batch = create(client, file.id, **more)
        assert create(client, file.id, **more).id == batch.id
        assert "secret" not in file.filename
        (pair,) = batch.metadata.items()
        assert not {"secret", "word"} & set(pair)
        database = tmp_path / "dir" / "specbatch.db"
        with sqlite3.connect(database) as connection:
            ((kept,),) = connection.execute("SELECT idempotency_key FROM batches").fetchall()
        assert "secret" not in kept


def test_the_client_sees_no_folders_of_the_operator() -> None:
    said = "output /srv/models/x: `file:///a/b` is not 'small', a/b or 3/4"
    assert without_places(said) == "output …: `…` is not 'small', a/b or 3/4"


def test_batches_come_in_pages(served: Served) -> None:
    client = served.client()
    file_id = upload(client)
    ids = [create(client, file_id).id for _ in range(5)]
    assert [batch.id for batch in client.batches.list(limit=2)] == ids[::-1]
    assert [batch.id for batch in client.batches.list(after="").data] == ids[::-1]


def test_a_file_of_an_open_batch_stays(served: Served) -> None:
    client = served.client()
    file_id = upload(client)
    batch = create(client, file_id)
    with pytest.raises(openai.ConflictError) as caught:
        client.files.delete(file_id)
    assert caught.value.code == "file_in_use"
    client.batches.cancel(batch.id)
    assert client.files.delete(file_id).deleted


def test_a_tenant_has_so_many_open_batches_and_no_more(served: Served) -> None:
    object.__setattr__(served.service, "most_open", 2)
    client = served.client()
    file_id = upload(client)
    first = create(client, file_id)
    create(client, file_id)
    with pytest.raises(openai.RateLimitError):
        create(client, file_id)
    client.batches.cancel(first.id)
    create(client, file_id)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"extra_body": {"endpoint": []}}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"extra_body": {"input_file_id": ["x"]}}, "input_file_id"),
        ({"extra_body": {"webhook": "http://x"}}, "webhook"),
    ],
)
def test_a_request_that_is_wrong_names_what_is_wrong(
    served: Served, values: dict[str, Any], param: str
) -> None:
    client = served.client()
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, upload(client), **values)
    assert caught.value.param == param


def test_giant_and_nested_bodies_are_refused(served: Served) -> None:
    client = served.client()
    for body, status in ((b"[" * 9000, 400), (b" " * 70_000, 413), (b"[]", 400)):
        with pytest.raises(openai.APIStatusError) as caught:
            client.post("/batches", cast_to=object, content=body)
        assert caught.value.status_code == status


def test_a_file_with_giant_lines_takes_little_memory(served: Served, tmp_path: Any) -> None:
    path = tmp_path / "giant"
    with path.open("wb") as file:
        file.truncate(40 << 20)  # one line of zeros
        file.seek(0, 2)
        file.write(b"\n" + jsonl(line("a")))
    tracemalloc.start()
    found = check_file(path, URL, {"small"}, 10)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found is not None
    assert peak_bytes < 36 << 20  # two readings of the longest line, and not the file
    assert [error["code"] for error in found.errors] == ["line_too_long"]
    assert (found.requests, found.model) == (1, "small")
    assert served.open_batches() == []
