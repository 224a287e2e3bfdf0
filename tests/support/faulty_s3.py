"""A proxy before an S3 server (or any other over HTTP) that fails where a test wants it to.

    with FaultyS3(s3.endpoint_url) as proxy:
        proxy.fail(Fault.UNAVAILABLE, "PUT", times=2)     # the next two PUTs get a 503
        proxy.decide = lambda call: ...                   # or: whatever the test decides, by call
        client = boto3.client("s3", endpoint_url=proxy.url)
    proxy.calls                                           # all that came, in order

Whatever is not to fail goes through unchanged. Nothing here sleeps: a request that hangs does so
until the client gives up or the proxy is closed.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import select
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit


class Fault(StrEnum):
    """What may go wrong with one request."""

    UNAVAILABLE = "unavailable"  # 503 SlowDown; the server never sees the request
    HANG = "hang"  # the same, and no answer at all
    DROP = "drop"  # the connection is closed in place of an answer; the server never sees it
    LOST_ANSWER = "lost answer"  # the server does it, and then the connection is closed
    CUT_ANSWER = "cut answer"  # the body ends half way, and the connection with it
    SHORT_ANSWER = "short answer"  # the body ends half way, and its length says so
    CUT_UPLOAD = "cut upload"  # the server is given the first half, without checksums, and is glad
    DENIED = "denied"  # 403 AccessDenied
    NO_SUCH_UPLOAD = "no such upload"  # 404, for which the server of the tests has a 500
    NOT_IMPLEMENTED = "not implemented"  # 501, as by a store that does not know a header


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it came in."""

    method: str
    path: str  # with the query
    size: int  # bytes of the body


@dataclass(slots=True)
class _Order:
    fault: Fault
    method: str
    part: str
    times: int


Decide = Callable[[Call], Fault | None]


class Seeded:
    """A `Decide` by which a share of all requests fails, by a seed; each kind of fault in turn."""

    OF_METHOD: ClassVar[Mapping[str, tuple[Fault, ...]]] = {
        "GET": (Fault.CUT_ANSWER, Fault.UNAVAILABLE, Fault.DROP, Fault.SHORT_ANSWER),
        "PUT": (Fault.CUT_UPLOAD, Fault.UNAVAILABLE, Fault.DROP, Fault.LOST_ANSWER),
    }
    OTHERS = (Fault.UNAVAILABLE, Fault.LOST_ANSWER)

    def __init__(self, seed: int, share: float = 0.15) -> None:
        self.done: Counter[Fault] = Counter()
        self._met: Counter[str] = Counter()
        self._draw, self._share = random.Random(seed), share
        self._lock = threading.Lock()

    def __call__(self, call: Call) -> Fault | None:
        with self._lock:
            if self._draw.random() >= self._share:
                return None
            faults = self.OF_METHOD.get(call.method, self.OTHERS)
            fault = faults[self._met[call.method] % len(faults)]
            self._met[call.method] += 1
            self.done[fault] += 1
            return fault


class FaultyS3:
    """Listens on a port of its own in threads of this process."""

    def __init__(self, target: str, decide: Decide | None = None) -> None:
        self.target = urlsplit(target)
        self.calls: list[Call] = []
        self.faults: list[tuple[Call, Fault]] = []
        self.decide: Decide = decide or self._by_orders
        self.closing = threading.Event()
        self._orders: list[_Order] = []
        self._lock = threading.Lock()
        self._server = _Server(self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="faulty-s3", daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fail(self, fault: Fault, method: str = "", part: str = "", times: int = 1) -> None:
        """Let the next requests fail: of this method, with `part` in path or query."""
        with self._lock:
            self._orders.append(_Order(fault, method, part, times))

    def heal(self) -> None:
        """Forget what was still to fail."""
        with self._lock:
            self._orders.clear()

    def took(self, call: Call) -> Fault | None:
        """Note a call; what is to happen to it."""
        with self._lock:
            self.calls.append(call)
        fault = self.decide(call)
        if fault is not None:
            with self._lock:
                self.faults.append((call, fault))
        return fault

    def _by_orders(self, call: Call) -> Fault | None:
        with self._lock:
            for order in self._orders:
                fits = order.method in ("", call.method) and order.part in call.path
                if fits and order.times > 0:
                    order.times -= 1
                    return order.fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, proxy: FaultyS3) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _handle(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = proxy.took(Call(self.command, self.path, len(body)))
        match fault:
            case Fault.UNAVAILABLE:
                self._answer_error(503, "SlowDown")
            case Fault.DENIED:
                self._answer_error(403, "AccessDenied")
            case Fault.NO_SUCH_UPLOAD:
                self._answer_error(404, "NoSuchUpload")
            case Fault.NOT_IMPLEMENTED:
                self._answer_error(501, "NotImplemented")
            case Fault.DROP:
                self._hang_up()
            case Fault.HANG:
                self._wait_for_the_client_to_leave()
                self._hang_up()
            case _:
                self._pass_on(body, fault)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle  # noqa: N815 - the base's names

    def _pass_on(self, body: bytes, fault: Fault | None) -> None:
        target = self.server.proxy.target
        dropped = {"expect", "connection", "content-length"}
        if fault is Fault.CUT_UPLOAD:
            body = body[: len(body) // 2]
            dropped |= {"x-amz-checksum-sha256", "content-md5", "x-amz-sdk-checksum-algorithm"}
        headers = {k: v for k, v in self.headers.items() if k.lower() not in dropped}
        headers["Content-Length"] = str(len(body))
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        if fault is Fault.LOST_ANSWER:
            self._hang_up()
            return
        half = data[: len(data) // 2]
        self.send_response(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in (
                "content-length",
                "transfer-encoding",
                "connection",
                "date",
                "server",
            ):
                self.send_header(name, value)
        length = len(half) if fault is Fault.SHORT_ANSWER else len(data)
        if self.command == "HEAD":
            length = int(answer.getheader("Content-Length") or 0)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(half if fault in (Fault.SHORT_ANSWER, Fault.CUT_ANSWER) else data)
        if fault is Fault.CUT_ANSWER:
            self._hang_up()

    def _answer_error(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>as ordered</Message></Error>".encode()
        data = b"" if self.command == "HEAD" else text
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def _wait_for_the_client_to_leave(self) -> None:
        while not self.server.proxy.closing.is_set():
            readable, _, _ = select.select([self.connection], [], [], 0.05)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                return

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: `FaultyS3.calls` tells all of it."""
