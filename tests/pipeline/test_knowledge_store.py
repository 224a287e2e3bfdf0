"""Knowledge in the store: read where it can be used, written in the background, nobody waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.pipeline.runtime.knowledge_store import KnowledgeStore
from specbatch.schemas.errors import StoreError
from support.databases import new_database, sqlite_store

ABOUT = "verifier on cpu"
PATIENCE_SEC = 60.0


class Broken(SqlStore):
    """A store that refuses what it is told to."""

    reads = writes = True

    def knowledge(self, key: str) -> Mapping[str, Any] | None:
        if not self.reads:
            raise StoreError("the database is away")
        return super().knowledge(key)

    def keep_knowledge(self, key: str, state: Mapping[str, Any]) -> None:
        if not self.writes:
            raise StoreError("the database is full")
        super().keep_knowledge(key, state)


def learned() -> Knowledge:
    knowledge = Knowledge()
    for tokens in (8, 16, 24) * 5:
        knowledge.step_time.observe(tokens, 8, 1e-4 * tokens)
        knowledge.acceptance_of("block").observe(4, 3)
    return knowledge


def test_what_is_kept_comes_back_by_its_key() -> None:
    store, knowledge = sqlite_store(), learned()
    memory = KnowledgeStore(store)
    assert memory.load(ABOUT) is None
    memory.keep(ABOUT, knowledge)
    memory.close()
    again = KnowledgeStore(store).load(ABOUT)
    assert again is not None
    assert again.state() == knowledge.state()
    assert KnowledgeStore(store).load("another machine") is None


def test_it_is_written_as_it_was_when_it_was_handed_over() -> None:
    store, knowledge = sqlite_store(), learned()
    memory, held = KnowledgeStore(store), threading.Event()
    memory._writer.submit(held.wait, PATIENCE_SEC)  # the writer is busy
    memory.keep(ABOUT, knowledge)
    before = knowledge.state()
    knowledge.acceptance_of("block").observe_many(0, 1000)
    assert store.knowledge(ABOUT) is None, "nobody waits for the database"
    held.set()
    memory.close()
    again = KnowledgeStore(store).load(ABOUT)
    assert again is not None
    assert again.state() == before != knowledge.state()


def test_the_newest_of_several_stays() -> None:
    store, knowledge = sqlite_store(), learned()
    memory = KnowledgeStore(store)
    for _ in range(5):
        knowledge.acceptance_of("block").observe(4, 0)
        memory.keep(ABOUT, knowledge)
    memory.close()
    again = KnowledgeStore(store).load(ABOUT)
    assert again is not None
    assert again.state() == knowledge.state()


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"pass_time": []},
        {**Knowledge().state(), "draft_times": []},
        {**Knowledge().state(), "acceptance": {"block": 3}},
        {**Knowledge().state(), "pass_time": {"drafted": 1, "noise": 0.1, "cells": [[1, 2]]}},
    ],
)
def test_something_else_in_the_store_is_ignored_with_a_warning(
    broken: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    store = sqlite_store()
    store.keep_knowledge(ABOUT, broken)
    with caplog.at_level(logging.WARNING):
        assert KnowledgeStore(store).load(ABOUT) is None
    (record,) = caplog.records
    assert record.getMessage().startswith(f"cannot use the machine knowledge of {ABOUT}")


def test_a_store_that_is_away_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    store, knowledge = Broken(new_database()), learned()
    memory = KnowledgeStore(store)
    store.reads = store.writes = False
    with caplog.at_level(logging.WARNING):
        assert memory.load(ABOUT) is None
        memory.keep(ABOUT, knowledge)
        memory._writer.submit(lambda: None).result(PATIENCE_SEC)
        assert [record.getMessage() for record in caplog.records] == [
            f"cannot use the machine knowledge of {ABOUT}: StoreError('the database is away')",
            f"could not save the machine knowledge of {ABOUT}: the database is full",
        ]
    store.reads = store.writes = True
    memory.keep(ABOUT, knowledge)  # and the next time it is kept
    memory.close()
    again = memory.load(ABOUT)
    assert again is not None
    assert again.state() == knowledge.state()
