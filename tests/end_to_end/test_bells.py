"""A broker that is away costs time, never work."""

from __future__ import annotations

import logging

import pytest

from specbatch.pipeline.bootstrap import patient
from specbatch.schemas.records import Bell, Stage


def test_a_worker_outlives_a_bell_that_cannot_be_rung(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Bell) -> None:
        raise ConnectionError("broker is away")

    with caplog.at_level(logging.WARNING):
        patient(broken)(Bell("0123456789", Stage.VERIFY, 3))
    assert "broker is away" in caplog.text


def test_a_bell_that_can_be_rung_is_rung_once() -> None:
    rung: list[Bell] = []
    bell = Bell("0123456789", Stage.RECORD, 0)
    patient(rung.append)(bell)
    assert rung == [bell]
