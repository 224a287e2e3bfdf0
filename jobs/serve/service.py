"""What the routes work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specbatch.jobs.serve.file_store import FileStore
from specbatch.jobs.serve.models import ServedModel
from specbatch.jobs.serve.rates import Rates
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.privacy.tenants import NOBODY_PRIVATE, Privacy
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.settings import Settings


@dataclass(frozen=True, slots=True)
class Service:
    """A service's store, folder, models and limits."""

    store: Store
    client: Client
    file_store: FileStore
    models: dict[str, ServedModel]
    since: int  # seconds since the epoch: when the models were listed
    wake: Callable[[], None] = lambda: None  # there is a batch to look at
    with_keys: bool = True
    privacy: Privacy = NOBODY_PRIVATE
    most_file_bytes: int = 512 << 20
    most_open: int = 100
    rates: Rates | None = None  # None: as many requests as come
    silence_sec: float = 60.0  # a client that uploads nothing for so long is given up
    page: Settings | None = None  # of the store, to show jobs in a browser; None: no page
