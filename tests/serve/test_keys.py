"""API keys: who may do what, and what others see of it."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import openai
import pytest
from serve.conftest import URL, Served, jsonl, line

from specbatch.schemas.serving import Scope


def test_a_key_is_needed_and_must_be_right(served: Served) -> None:
    key = served.key()
    wrong = key[:-1] + ("A" if key[-1] != "A" else "B")
    for given in (wrong, "sk-something", key[: len("sb-") + 12], "x" * 5000):
        with pytest.raises(openai.AuthenticationError) as caught:
            served.client(given).files.list()
        assert caught.value.code == "invalid_api_key"
    answer = httpx2.get(f"http://127.0.0.1:{served.port}/v1/files")
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "missing_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_the_store_has_no_key_in_clear(served: Served) -> None:
    key = served.key()
    secret = key.split("-", 2)[2]
    served.store.close()
    folder = Path(served.settings.workspace)
    raw = b"".join(path.read_bytes() for path in folder.glob("specbatch.db*"))
    assert secret.encode() not in raw
    with sqlite3.connect(folder / "specbatch.db") as db:
        ((digest,),) = db.execute("SELECT digest FROM api_keys").fetchall()
    assert len(digest) == 32


def test_expired_and_revoked_keys_do_not_count(served: Served) -> None:
    old = served.key(expires_at=time.time() - 1)
    with pytest.raises(openai.AuthenticationError, match="expired"):
        served.client(old).files.list()
    key = served.key(expires_at=time.time() + 1000)
    served.client(key).files.list()
    served.store.revoke_api_key(key.split("-")[1])
    with pytest.raises(openai.AuthenticationError, match="revoked"):
        served.client(key).files.list()


def test_a_key_does_what_its_scopes_say(served: Served) -> None:
    reader = served.client(served.key("default", Scope.READ))
    writer = served.client(served.key("default", Scope.WRITE))
    file = writer.files.create(file=jsonl(line("a")), purpose="batch")
    assert reader.files.retrieve(file.id).id == file.id
    refused: list[Callable[[], object]] = [
        lambda: reader.files.create(file=b"{}", purpose="batch"),
        lambda: reader.files.delete(file.id),
        lambda: reader.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h"),
        lambda: writer.files.content(file.id),
        lambda: writer.models.list(),
    ]
    for call in refused:
        with pytest.raises(openai.PermissionDeniedError) as caught:
            call()
        assert caught.value.code == "missing_scope"


def test_what_is_another_tenants_looks_like_what_is_not(served: Served) -> None:
    mine, other = served.client(), served.client(served.key("other"))
    file = mine.files.create(file=jsonl(line("a")), purpose="batch")
    batch = mine.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
    served.reconciler.step_all()
    unknown_file, unknown_batch = "file-" + "0" * 31, "batch_" + "0" * 31
    pairs: list[tuple[Callable[[str], object], str, str]] = [
        (other.files.retrieve, file.id, unknown_file),
        (other.files.content, file.id, unknown_file),
        (other.files.delete, file.id, unknown_file),
        (other.batches.retrieve, batch.id, unknown_batch),
        (other.batches.cancel, batch.id, unknown_batch),
        (lambda i: other.get(f"/batches/{i}/results", cast_to=object), batch.id, unknown_batch),
    ]
    for call, there, nowhere in pairs:
        said = []
        for given in (there, nowhere):
            with pytest.raises(openai.NotFoundError) as caught:
                call(given)
            said.append(str(caught.value.message).replace(given, "ID"))
        assert said[0] == said[1]
    with pytest.raises(openai.NotFoundError):
        other.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
    assert other.files.list().data == []
    assert other.batches.list().data == []
    assert mine.batches.retrieve(batch.id).status == "in_progress"


def test_without_keys_pages_in_a_browser_are_refused(served: Served) -> None:
    object.__setattr__(served.service, "with_keys", False)
    url = f"http://127.0.0.1:{served.port}/v1/models"
    assert [model.id for model in served.client("anything").models.list()] == ["small", "org/large"]
    answer = httpx2.get(url, headers={"Origin": "https://evil.example"})
    assert answer.status_code == 403
    assert httpx2.get(url, headers={"Host": "evil.example"}).status_code == 403
    assert served.client("anything").models.retrieve("org/large").id == "org/large"
    with pytest.raises(openai.NotFoundError):
        served.client("anything").models.retrieve("../small")


def test_answers_to_what_there_is_not_have_openais_shape(served: Served) -> None:
    client = served.client()
    for path in ("/chat", "/files/x/y"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.get(path, cast_to=object)
        assert caught.value.type == "not_found_error"
    with pytest.raises(openai.APIStatusError) as method:
        client.post("/models", cast_to=object, body={})
    assert method.value.status_code == 405
    for limit, said in (("no", "a whole number"), (0, "at least 1"), (10**9, "at most 10000")):
        with pytest.raises(openai.BadRequestError, match=f"`limit` must be {said}") as caught_limit:
            client.get(f"/files?limit={limit}", cast_to=object)
        assert caught_limit.value.param == "limit"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/chat/completions", "upload a file, then POST /v1/batches"),
        ("/v1/completions", "upload a file, then POST /v1/batches"),
        ("/v1/responses", "upload a file, then POST /v1/batches"),
        ("/files", "base_url ends in /v1"),
        ("/v1/files/", "there is no POST /v1/files/"),
    ],
)
def test_a_route_that_there_is_not_says_where_to_go(served: Served, path: str, said: str) -> None:
    answer = httpx2.post(f"http://127.0.0.1:{served.port}{path}")
    assert answer.status_code == 404
    assert said in answer.json()["error"]["message"]


def test_a_mistake_of_a_client_is_no_warning_in_the_log(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with pytest.raises(openai.NotFoundError):
        served.client().files.retrieve("file-none")
    (record,) = [one for one in caplog.records if "a request failed" in one.message]
    assert record.levelname == "INFO"
