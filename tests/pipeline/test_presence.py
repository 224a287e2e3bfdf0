"""What a worker process tells the store of itself, and what it logs where that fails."""

from __future__ import annotations

import logging
import threading
from typing import cast

import pytest

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime import presence
from specbatch.pipeline.runtime.presence import Presence
from specbatch.schemas.errors import StoreError
from specbatch.schemas.presence import WorkerProcess

MANY = 20  # looks


class Refusing:
    """A store that does not let this worker tell of itself."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    def report_process(self, _process: WorkerProcess, trouble: str | None) -> None:
        self.asked.append(trouble)
        raise StoreError("no rights")

    def forget_process(self, _process_id: str) -> None:
        raise StoreError("no rights")


def looks(store: Refusing, troubles: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a presence look at each of these, one after another."""
    monkeypatch.setattr(presence, "POLL_SEC", 0.001)
    left, done = list(troubles), threading.Event()

    def trouble() -> str | None:
        if len(left) == 1:
            done.set()
            return left[0]
        return left.pop(0)

    one = Presence(cast(Store, store), WorkerProcess("1", "host:1", ("all",)), trouble, 600.0)
    one.start()
    assert done.wait(60)
    one.close()


def test_a_store_that_refuses_is_neither_asked_nor_told_of_at_every_look(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Refusing()
    looks(store, [None] * MANY, monkeypatch)
    assert store.asked == [None]
    told = [r for r in caplog.records if "could not announce this process" in r.message]
    assert [r.levelno for r in told] == [logging.WARNING]


def test_a_change_is_told_at_once_also_where_the_store_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Refusing()
    looks(store, [*[None] * MANY, *["no broker"] * MANY], monkeypatch)
    assert store.asked == [None, "no broker"]
    assert caplog.text.count("could not announce this process") == 1
