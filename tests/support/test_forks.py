"""The process that forks for tests, begun by whoever needs it first."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from support import forks


def test_two_that_begin_at_once_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two, the one that is dropped ends, and what it has forked is killed with it."""
    begun: list[object] = []
    second = threading.Event()

    class Slow:
        def __init__(self, _preloaded: str) -> None:
            begun.append(self)
            if len(begun) > 1:
                second.set()
            second.wait(0.2)

    monkeypatch.setattr(forks, "_only_forge", cache(Slow))
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: forks._forge(""), range(2)))
    assert found == [begun[0], begun[0]]
