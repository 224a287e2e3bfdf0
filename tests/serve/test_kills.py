"""`specbatch serve` as users start it: its runner and itself are killed, and everything goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
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
URL: Any = "/v1/completions"  # the demo pair has no template for chats


def request(name: str) -> dict[str, Any]:
    body = {"model": "small", "prompt": f"def {name}(x):"}
    return {"custom_id": name, "method": "POST", "url": URL, "body": body}


class Running:
    """The service in a folder, on one port through all of its starts."""

    def __init__(self, home: Path) -> None:
        self.home, self.port = home, free_port()
        model = {
            "verifier": str(demo.VERIFIER),
            "proposer": str(demo.DRAFT),
            "spec": {
                "sampling": {"max_tokens": 48, "temperature": 0.8, "seed": 3},
                "engine": {"dtype": "float32"},
                "group_size": 4,
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
                    "SPECBATCH_MAX_CONCURRENT_SEQUENCES": "4",  # so that groups end one by one
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
        tasks = Path(f"/proc/{self.process.pid}/task")
        children = [pid for t in tasks.iterdir() for pid in (t / "children").read_text().split()]
        for pid in children:
            with contextlib.suppress(OSError):
                if b"serve_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
        return None

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_SEC)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.chdir(tmp_path)
    found = Running(tmp_path)
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


def new_batch(client: openai.OpenAI, key: str) -> Any:
    file = client.files.create(
        file=jsonl(*(request(f"r{i}") for i in range(ROWS))), purpose="batch"
    )
    return client.batches.create(
        input_file_id=file.id, endpoint=URL, completion_window="24h",
        extra_headers={"Idempotency-Key": key},
    )  # fmt: skip


def texts(client: openai.OpenAI, batch_id: str) -> dict[str, str]:
    """The text of each request of a completed batch; each is there once."""
    batch = client.batches.retrieve(batch_id)
    assert batch.status == "completed", batch
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": ROWS, "completed": ROWS, "failed": 0}
    assert batch.output_file_id is not None
    lines = [orjson.loads(one) for one in client.files.content(batch.output_file_id).iter_lines()]
    assert set(Counter(one["custom_id"] for one in lines).values()) == {1}
    assert len(lines) == ROWS
    return {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in lines}


def test_whoever_is_killed_everything_goes_on(running: Running) -> None:
    wait_until("the service answers", running.answers)
    client = running.client()
    batch = new_batch(client, "night-1")

    def done_rows() -> int:
        own = client.batches.retrieve(batch.id).to_dict().get("specbatch")
        return int(own["rows_done"]) if own else 0  # type: ignore[index,call-overload]  # an object

    wait_until("some rows are done", done_rows)
    runner = running.runner()
    assert runner is not None
    os.kill(runner, signal.SIGKILL)
    before = done_rows()
    assert before > 0
    so_far = client.get(f"/batches/{batch.id}/results", cast_to=openai.types.FileContent)
    assert before <= len(so_far.splitlines()) <= ROWS
    wait_until("another runner goes on", lambda: running.runner() not in (None, runner))
    files = client.files.list().data
    with half_an_upload(running):
        running.kill()
    running.process = running.start()
    wait_until("the service answers again", running.answers)
    assert client.files.list().data[-len(files) :] == files
    assert list(uploads(running).iterdir()) == []
    assert new_batch(client, "night-2").id != batch.id
    second = client.batches.list().data[0]
    again = client.batches.create(
        input_file_id=batch.input_file_id, endpoint=URL, completion_window="24h",
        extra_headers={"Idempotency-Key": "night-1"},
    )  # fmt: skip
    assert again.id == batch.id
    wait_until("both end", lambda: client.batches.retrieve(second.id).status == "completed")
    assert texts(client, batch.id) == texts(client, second.id)  # as if nobody had been killed
