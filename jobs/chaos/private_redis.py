"""Starts a private Redis for one command, on a free port and without persistence."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from specbatch.schemas.errors import UsageError

_PATIENCE_SEC = 30.0
_ATTEMPTS = 3  # the free port may be taken before it is used


@contextlib.contextmanager
def private_redis(folder: Path) -> Iterator[str]:
    """Start one and yield its URL. Raises `UsageError` if redis-server is missing."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise UsageError(
            "worker processes need a broker to share: install redis-server (on Debian "
            "`apt-get install redis-server`), or name an empty Redis database with --redis "
            "redis://host:6379/15"
        )
    for _ in range(_ATTEMPTS):
        port = _free_port()
        with (folder / "redis.log").open("ab") as log:
            process = subprocess.Popen(
                [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            if _answers(process, port):
                yield f"redis://127.0.0.1:{port}/0"
                return
        finally:
            process.kill()
            process.wait()
    tail = (folder / "redis.log").read_text(errors="replace")[-300:]
    raise UsageError(f"redis-server did not start: {tail}")


def refuse_used(url: str) -> None:
    """Raise `UsageError` unless the database at this URL exists and is empty. Other jobs and
    workers must not meet the disturbed ones."""
    import redis

    client = redis.Redis.from_url(url, socket_connect_timeout=5)
    try:
        keys = int(client.dbsize())
    except redis.RedisError as error:
        raise UsageError(f"the Redis that --redis names cannot be used: {error}") from None
    finally:
        client.close()
    if keys:
        raise UsageError(
            f"the Redis database that --redis names holds {keys} keys: name an empty one"
        )


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the server answers or has ended."""
    looked, deadline = threading.Event(), time.monotonic() + _PATIENCE_SEC
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as link:
            link.sendall(b"PING\r\n")
            if link.recv(64).startswith(b"+PONG"):
                return True
        looked.wait(0.02)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
