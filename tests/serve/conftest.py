"""The service on a port of its own in a thread, asked by OpenAI's own client."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
import uvicorn

from specbatch.jobs.cli.connect import forgiving_enqueue
from specbatch.jobs.serve.app import make_app
from specbatch.jobs.serve.connections import Guarded, server_config
from specbatch.jobs.serve.file_store import FileStore
from specbatch.jobs.serve.keys import make_key
from specbatch.jobs.serve.models import ServedModel
from specbatch.jobs.serve.reconciler import Reconciler
from specbatch.jobs.serve.service import Service
from specbatch.pipeline.bootstrap import make_client, make_store
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.schemas.serving import BatchRow, Scope
from specbatch.schemas.settings import Settings
from support.databases import migrated

URL = "/v1/chat/completions"
KEY = base64.b64encode(bytes(range(32))).decode()  # of a private tenant


@dataclass
class Served:
    """A service that listens, without a runner: tests take its steps."""

    settings: Settings
    service: Service
    reconciler: Reconciler
    port: int

    @property
    def store(self) -> Store:
        return self.service.store

    def open_batches(self) -> list[BatchRow]:
        return self.store.open_batches(self.service.file_store.service_id)

    def client(self, key: str | None = None, **options: Any) -> openai.OpenAI:
        """The official client. Without a key it has a new one of tenant `default`."""
        key = key or self.key()
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key=key, **{"max_retries": 0, **options})

    def key(self, tenant: str = "default", *scopes: Scope, expires_at: float | None = None) -> str:
        return make_key(self.store, "test", tenant, scopes or tuple(Scope), expires_at)[1]


@dataclass(frozen=True)
class Made:
    """A service that nobody listens for."""

    settings: Settings
    service: Service
    reconciler: Reconciler


@contextmanager
def made_service(
    folder: Path,
    models: dict[str, ServedModel],
    broker_url: str = "memory://",
    more_settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[Made]:
    """A service on `folder` with these models; `options` are fields of `Service`."""
    migrated(folder / "specbatch.db")
    settings = Settings(
        workspace=str(folder),
        broker_url=broker_url,
        sweep_interval_sec=0.3,
        **(more_settings or {}),
    )
    file_store = FileStore(folder)
    file_store.make()
    store = make_store(settings)
    client = make_client(settings, forgiving_enqueue(settings), store)
    privacy = Privacy.of_settings(settings)
    reconciler = Reconciler(store, client, file_store, models, most_requests=100, privacy=privacy)
    more = {"since": 1_700_000_000, "privacy": privacy, "page": settings}
    service = Service(store, client, file_store, models, **{**more, **options})
    try:
        yield Made(settings, service, reconciler)
    finally:
        store.close()


@contextmanager
def listening(service: Service, connection: type[Guarded] = Guarded) -> Iterator[int]:
    """The service's port, for so long."""
    sock = socket.create_server(("127.0.0.1", 0))  # listens: who connects early waits
    server = uvicorn.Server(server_config(make_app(service), connection=connection))
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def serving(
    folder: Path, models: dict[str, ServedModel], *args: Any, **options: Any
) -> Iterator[Served]:
    """A service that listens; what it takes is said at `made_service`."""
    with made_service(folder, models, *args, **options) as made, listening(made.service) as port:
        yield Served(made.settings, made.service, made.reconciler, port)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A service whose models are names only: nothing is run."""
    models = {
        name: ServedModel(name, {"verifier": f"models/{name}"}, tmp_path)
        for name in ("small", "org/large")
    }
    with serving(tmp_path / "serve-dir", models) as found:
        yield found


def line(custom_id: str, content: str = "hello", **values: Any) -> dict[str, Any]:
    """A request of a batch file; `values` are of its body."""
    body = {"model": "small", "messages": [{"role": "user", "content": content}], **values}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body}


def jsonl(*lines: Any) -> bytes:
    return b"".join(orjson.dumps(one) + b"\n" for one in lines)
