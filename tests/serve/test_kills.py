"""`specbatch serve` as users start it: its runner and itself are killed, and everything goes on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
import yaml
from serve.conftest import jsonl

from specbatch.jobs.cli.serve import serving_settings
from specbatch.jobs.serve.keys import EVERYTHING, make_key
from specbatch.pipeline.bootstrap import make_store
from support import demo, forks
from support.servers import free_port
from support.workers import WAIT_SEC, wait_until

pytestmark = pytest.mark.integration  # starts processes that import torch
ROWS = 48
MANY, KILLS, LONG_SEC = 50_000, 10, 1800.0
URL: Any = "/v1/completions"  # the demo pair has no template for chats


def request(name: str, **values: Any) -> dict[str, Any]:
    body = {"model": "small", "prompt": f"def {name}(x):", **values}
    return {"custom_id": name, "method": "POST", "url": URL, "body": body}


class Running:
    """The service in a folder, on one port through all of its starts."""

    def __init__(self, home: Path, at_once: int) -> None:
        self.home, self.port, self.at_once = home, free_port(), at_once
        model = {
            "verifier": str(demo.VERIFIER),
            "proposer": str(demo.DRAFT),
            "spec": {
                "sampling": {"max_tokens": 48, "temperature": 0.8, "seed": 3},
                "engine": {"dtype": "float32"},
                "group_size": at_once,
            },
        }
        (home / "models.yaml").write_text(yaml.safe_dump({"models": {"small": model}}))
        self.folder = home / "specbatch-serve"
        store = make_store(serving_settings(self.folder))
        self.key = make_key(store, "test", "default", EVERYTHING, None)[1]
        store.close()
        self.process = self.start()

    def start(self) -> forks.Forked:
        with (self.home / "serve.log").open("ab") as log:
            return forks.fork(
                *("specbatch", "serve", "--models", "models.yaml", "--port", str(self.port)),
                environment={
                    "SPECBATCH_SWEEP_INTERVAL_SEC": "0.3",
                    "SPECBATCH_LEASE_SEC": "3",
                    "SPECBATCH_MAX_CONCURRENT_SEQUENCES": str(self.at_once),
                },
                cwd=self.home,
                stdout=log,
                stderr=log,
            )

    def client(self) -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key=self.key, max_retries=0)

    def answers(self) -> bool:
        with contextlib.suppress(openai.APIConnectionError):
            return bool(self.client().models.list().data)
        assert self.process.poll() is None, (self.home / "serve.log").read_text()
        return False

    def runner(self) -> int | None:
        """The runner's process id."""
        children: list[str] = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has ended meanwhile
                children += (task / "children").read_text().split()
        for pid in children:
            with contextlib.suppress(OSError):
                if b"serve_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
        return None

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_SEC)

    def kill_runner(self) -> None:
        pid = self.runner()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until("another runner is there", lambda: self.runner() not in (None, pid))

    def start_again(self) -> None:
        self.process = self.start()
        wait_until("the service answers again", self.answers)


@pytest.fixture
def running(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Running]:
    """Its parameter: how many rows are done at once, and in a group."""
    monkeypatch.chdir(tmp_path)
    found = Running(tmp_path, request.param)
    wait_until("the service answers", found.answers)
    try:
        yield found
    finally:
        found.process.send_signal(signal.SIGTERM)
        found.process.wait(WAIT_SEC)


def half_an_upload(running: Running) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", running.port))
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {running.key}\r\n"
        "Content-Length: 9999\r\nContent-Type: multipart/form-data; boundary=b\r\n\r\n"
        '--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    )
    sock.sendall(head.encode() + jsonl(request("half")))
    wait_until("half a file is on the disk", lambda: list(uploads(running).iterdir()))
    return sock


def uploads(running: Running) -> Path:
    return running.folder / "serve" / "uploads"


def new_batch(client: openai.OpenAI, key: str, requests: Sequence[dict[str, Any]]) -> Any:
    file = client.files.create(file=jsonl(*requests), purpose="batch")
    return of_file(client, key, file.id)


def of_file(client: openai.OpenAI, key: str, file_id: str) -> Any:
    return client.batches.create(
        input_file_id=file_id, endpoint=URL, completion_window="24h",
        extra_headers={"Idempotency-Key": key},
    )  # fmt: skip


def rows_done(client: openai.OpenAI, batch_id: str) -> int:
    own = client.batches.retrieve(batch_id).to_dict().get("specbatch")
    return int(own["rows_done"]) if own else 0  # type: ignore[index,call-overload]  # an object


def has_done(client: openai.OpenAI, batch_id: str, rows: int) -> bool:
    return rows_done(client, batch_id) >= rows or has_ended(client, batch_id)


def has_ended(client: openai.OpenAI, batch_id: str) -> bool:
    return client.batches.retrieve(batch_id).status in ("completed", "failed", "expired")


def texts(client: openai.OpenAI, batch_id: str, rows: int = ROWS) -> dict[str, str]:
    """The text of each request of a completed batch; each is there once."""
    batch = client.batches.retrieve(batch_id)
    assert batch.status == "completed", batch
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": rows, "completed": rows, "failed": 0}
    assert batch.output_file_id is not None
    lines = [orjson.loads(one) for one in client.files.content(batch.output_file_id).iter_lines()]
    assert set(Counter(one["custom_id"] for one in lines).values()) == {1}
    assert len(lines) == rows
    return {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in lines}


@pytest.mark.parametrize("running", [4], indirect=True)  # so that groups end one by one
def test_whoever_is_killed_everything_goes_on(running: Running) -> None:
    client = running.client()
    requests = [request(f"r{i}") for i in range(ROWS)]
    batch = new_batch(client, "night-1", requests)
    wait_until("some rows are done", lambda: rows_done(client, batch.id))
    running.kill_runner()
    before = rows_done(client, batch.id)
    assert before > 0
    so_far = client.get(f"/batches/{batch.id}/results", cast_to=openai.types.FileContent)
    assert before <= len(so_far.splitlines()) <= ROWS
    files = client.files.list().data
    with half_an_upload(running):
        running.kill()
    running.start_again()
    assert client.files.list().data[-len(files) :] == files
    assert list(uploads(running).iterdir()) == []
    second = new_batch(client, "night-2", requests)
    assert second.id != batch.id
    assert of_file(client, "night-1", batch.input_file_id).id == batch.id
    wait_until("both end", lambda: has_ended(client, second.id))
    assert texts(client, batch.id) == texts(client, second.id)  # as if nobody had been killed


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("running", [250], indirect=True)
def test_fifty_thousand_requests_survive_ten_kills(running: Running) -> None:
    """The service and its runner die in turns; then some of the requests are asked once more."""
    client = running.client()
    requests = [request(f"r{i}", max_tokens=2) for i in range(MANY)]
    batch = new_batch(client, "night", requests)
    of_it = client.files.list().data, batch.id
    lots = random.Random(1)
    for kill, rows in enumerate(sorted(lots.sample(range(1, MANY), KILLS))):
        enough = partial(has_done, client, batch.id, rows)
        wait_until(f"{rows} rows are done", enough, sec=LONG_SEC)
        if kill % 2:
            running.kill_runner()
        else:
            running.kill()
            running.start_again()
        assert (client.files.list().data, client.batches.list().data[0].id) == of_it
    wait_until("it ends", lambda: has_ended(client, batch.id), sec=LONG_SEC)
    found = texts(client, batch.id, MANY)
    few = lots.sample(requests, 200)
    undisturbed = new_batch(client, "again", few)
    wait_until("few requests end", lambda: has_ended(client, undisturbed.id))
    same = {name: found[name] for name in (one["custom_id"] for one in few)}
    assert texts(client, undisturbed.id, 200) == same
