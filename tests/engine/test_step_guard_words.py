"""What the guard of hung steps says: how long it waited, and where it is off."""

from __future__ import annotations

import logging

import pytest

from specbatch.pipeline.engines import step_guard


def test_without_the_c_library_it_warns(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers log warnings: what is less is not seen."""
    monkeypatch.setattr(step_guard, "start_watch", lambda *_: False)
    step_guard.guard(900.0, 60.0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the C library is missing" in record.message


def test_it_says_when_it_really_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, str]] = []

    def start(_step: object, seconds: float, message: str, _code: int) -> bool:
        asked.append((seconds, message))
        return True

    monkeypatch.setattr(step_guard, "start_watch", start)
    step_guard.guard(900.0, 60.0)
    ((seconds, message),) = asked
    assert seconds == 1020.0
    assert "has not ended for 1020 s (SPECBATCH_STEP_DEADLINE_SEC is 900; two leases" in message
