"""Clients that send or take as slowly as they can: each has its time, and others are answered."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from serve.conftest import Made, jsonl, line, listening, made_service
from serve.test_sign_in import MODELS

from specbatch.jobs.serve.connections import Guarded
from specbatch.jobs.serve.errors import ApiError
from specbatch.jobs.serve.keys import EVERYTHING, make_key
from specbatch.jobs.serve.uploads import LEAST_BYTES_PER_SEC, in_time
from support.workers import wait_until

MOST = 8  # connections
PATIENCE_SEC = 60  # of the test itself


class Small(Guarded):
    """It takes few connections, and waits for ever."""

    head_sec = 1e6
    stalled_sec = 1e6

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limit_concurrency = MOST


class Hasty(Guarded):
    """It waits a moment."""

    head_sec = 0.2
    stalled_sec = 0.2


class Patient(Guarded):
    """It waits a moment for a head, and for ever for anything else."""

    head_sec = 0.2
    stalled_sec = 1e6


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    with made_service(tmp_path / "serve-dir", MODELS) as found:
        yield found


def key_of(made: Made) -> str:
    return make_key(made.service.store, "k", "default", EVERYTHING, None)[1]


def client_of(port: int, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)


@contextmanager
def connected(port: int, sent: str) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.settimeout(PATIENCE_SEC)
        sock.sendall(sent.encode())
        yield sock


def answers_with(sock: socket.socket, wanted: bytes) -> bool:
    """Whether it comes before the end; an answer may arrive in several pieces."""
    got = b""
    while wanted not in got and (chunk := sock.recv(1 << 16)):
        got += chunk
    return wanted in got


def is_closed(sock: socket.socket) -> bool:
    """Waits until it is."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "GET /v1/models HTTP/1.1\r\nHost: a\r\nX: ",
        "POST /sign-in HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n"
        "Content-Type: application/x-www-form-urlencoded\r\n\r\nk",
        "POST /v1/files HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\nk",  # without a key
    ],
    ids=["nothing", "half-a-head", "half-a-form", "refused"],
)
def test_many_clients_that_send_nothing_more_keep_nobody_out(made: Made, sent: str) -> None:
    key = key_of(made)
    with listening(made.service, Small) as port, ExitStack() as stack:
        slow = [stack.enter_context(connected(port, sent)) for _ in range(3 * MOST)]
        for _ in range(3):
            with client_of(port, key) as client:
                assert [one.id for one in client.models.list()] == ["small"]
        assert is_closed(slow[0])


def test_a_client_that_uploads_keeps_its_place(made: Made) -> None:
    key = key_of(made)
    content = jsonl(line("a"))
    body = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
        b'Content-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
        + content
        + b"\r\n--b--\r\n"
    )
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    )
    uploads = made.service.file_store.uploads
    with listening(made.service, Small) as port, ExitStack() as stack:
        upload = stack.enter_context(connected(port, head + body[:150].decode()))
        wait_until("the service has begun to read it", lambda: list(uploads.iterdir()))
        for _ in range(3 * MOST):
            stack.enter_context(connected(port, "GET"))
        with client_of(port, key) as client:
            client.models.list()
        upload.sendall(body[150:])
        assert answers_with(upload, b"200 OK")


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "GET /sign-in HTTP/1.1\r\nHost: a\r\n",
        "POST /v1/files HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\nk",
        "GET /static/page.css HTTP/1.1\r\nHost: a\r\n\r\nGET /static/page.css HTTP/1.1\r\nHost",
    ],
    ids=["nothing", "half-a-head", "a-body-nobody-wants", "half-of-a-second"],
)
def test_who_has_sent_no_whole_head_in_time_is_closed(made: Made, sent: str) -> None:
    with listening(made.service, Hasty) as port, connected(port, sent) as sock:
        assert is_closed(sock)


def test_the_rest_of_a_refused_body_may_take_as_long_as_a_body(made: Made) -> None:
    refused = "POST /v1/files HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\nk"
    with listening(made.service, Patient) as port, connected(port, refused) as sock:
        assert answers_with(sock, b"401 Unauthorized")
        with connected(port, "") as later:
            assert is_closed(later), "the time for a head is over"
        sock.sendall(b"k" * 98 + b"GET /static/page.css HTTP/1.1\r\nHost: a\r\n\r\n")
        assert answers_with(sock, b"200 OK")
        assert is_closed(sock), "the next head has the time of a head"


def test_bytes_that_drip_do_not_begin_the_time_anew(made: Made) -> None:
    """With a byte each time that the service could have waited anew."""
    with listening(made.service, Hasty) as port, connected(port, "GET / HTTP/1.1\r\nX: ") as sock:
        sock.settimeout(Hasty.head_sec / 4)
        for _ in range(1000):
            try:
                sock.sendall(b"x")
                if not sock.recv(1):
                    return
            except TimeoutError:
                continue
            except OSError:
                return
    pytest.fail("it waits for ever")


def test_who_does_not_take_an_answer_is_closed(made: Made) -> None:
    key, large = key_of(made), b"x" * (24 << 20)  # more than the system holds for it
    with listening(made.service, Hasty) as port:
        with client_of(port, key) as client:
            file = client.files.create(file=large, purpose="batch")
            assert client.files.content(file.id).read() == large, "who takes it has it whole"
        head = f"GET /v1/files/{file.id}/content HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}"
        with connected(port, f"{head}\r\n\r\n") as sock:
            had = 0
            with client_of(port, key) as client:
                client.models.list()
            asleep = asyncio.Event()
            with pytest.raises(TimeoutError):
                asyncio.run(asyncio.wait_for(asleep.wait(), 3 * Hasty.stalled_sec))
            try:
                while chunk := sock.recv(1 << 20):
                    had += len(chunk)
            except ConnectionResetError:
                pass
            assert had < len(large)


def test_a_body_may_take_long_and_must_not_drip() -> None:
    async def received(sizes: list[int], step_sec: float, own_sec: float = 0.0) -> int:
        """`own_sec`: that the service takes for a chunk."""
        clock = asyncio.get_running_loop()
        begun = clock.time()
        clock.time = lambda: begun + now[0]  # type: ignore[method-assign]  # only this test moves it
        now = [0.0]

        async def chunks() -> AsyncIterator[bytes]:
            for size in sizes:
                now[0] += step_sec
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                yield b"x" * size

        had = 0
        async for one in in_time(chunks(), 60.0):
            had += len(one)
            now[0] += own_sec
        return had

    steady = [LEAST_BYTES_PER_SEC * 50] * 20
    assert asyncio.run(received(steady, 50.0)) == sum(steady)
    assert asyncio.run(received(steady, 50.0, own_sec=1000.0)) == sum(steady)
    for sizes, step_sec in (([1] * 10, 50.0), ([1], 61.0), ([LEAST_BYTES_PER_SEC] * 90, 2.0)):
        with pytest.raises(ApiError, match="came too slowly: send at least 1,024") as caught:
            asyncio.run(received(sizes, step_sec))
        assert caught.value.status == 408
