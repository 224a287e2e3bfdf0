"""What is switched off reaches the engines with heartbeats, and stays while the store is away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from specbatch.pipeline.engines.contract import Engines
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.runtime.switch_reader import UNREAD, SwitchReader
from specbatch.schemas.draft_switches import (
    ALL_ON,
    DraftSwitch,
    DraftSwitches,
    RowScope,
    SwitchScope,
)
from specbatch.schemas.errors import StoreError
from support.databases import new_database

TAGGED = SwitchScope(tag="de")


class Host:
    """Keeps what it was given."""

    def __init__(self) -> None:
        self.given: list[DraftSwitches] = []

    def switch(self, switches: DraftSwitches) -> None:
        self.given.append(switches)


class Away:
    """A store that is out of reach while `is_away`."""

    def __init__(self, store: Store) -> None:
        self.store, self.is_away = store, False

    def draft_switches(self) -> list[DraftSwitch]:
        if self.is_away:
            raise StoreError("the store cannot be reached")
        return self.store.draft_switches()


@pytest.fixture
def away() -> Iterator[Away]:
    store = open_store(new_database(), actor="alice")
    yield Away(store)
    store.close()


def reader_of(away: Away, *hosts: Host) -> SwitchReader:
    return SwitchReader(cast(Store, away), [cast(Engines, host) for host in hosts])


def test_engines_hear_of_changes_and_of_nothing_else(away: Away) -> None:
    hosts = Host(), Host()
    reader = reader_of(away, *hosts)
    for _ in range(3):
        reader.read()
    made, _ = away.store.switch_drafting_off(TAGGED, "acceptance fell")
    for _ in range(3):
        reader.read()
    away.store.switch_drafting_on(TAGGED)
    reader.read()
    off = DraftSwitches((made,))
    assert hosts[0].given == hosts[1].given == [UNREAD, ALL_ON, off, ALL_ON]
    assert reader.now == ALL_ON


def test_what_was_read_last_counts_while_the_store_is_away(away: Away) -> None:
    host = Host()
    made, _ = away.store.switch_drafting_off(TAGGED, "acceptance fell")
    reader = reader_of(away, host)
    reader.read()
    away.is_away = True
    reader.read()
    assert reader.now == host.given[-1] == DraftSwitches((made,))


def test_nothing_is_drafted_before_the_store_was_read(away: Away) -> None:
    host, away.is_away = Host(), True
    reader = reader_of(away, host)
    reader.read()
    assert host.given[-1].is_off(RowScope("search", "nightly"), "ngram")
    away.is_away = False
    reader.read()
    assert host.given[-1] == ALL_ON
