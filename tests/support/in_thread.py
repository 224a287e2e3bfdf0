"""Runs steps in a thread of their own."""

from __future__ import annotations

import threading
from typing import Any


def in_thread(*steps: Any) -> None:
    """What a thread works on stays with it: a test's own thread may have some of another test."""
    thread = threading.Thread(target=lambda: [step() for step in steps])
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
