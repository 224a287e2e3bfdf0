"""A webhook on this host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver(ThreadingHTTPServer):
    """Keeps what it gets, and answers with the next of `answers`, else 204. `before` is called
    between the two, `after` before the answer ends."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.paths: list[str] = []
        self.answers: list[int] = []
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], object] = lambda: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.paths.append(self.path)
        server.got.append(({k.lower(): v for k, v in self.headers.items()}, body))
        server.before()
        status = server.answers.pop(0) if server.answers else 204
        self.send_response(status)
        if 300 <= status < 400:
            self.send_header("Location", f"{server.url}/elsewhere")
        self.end_headers()
        server.after()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def receiving() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
