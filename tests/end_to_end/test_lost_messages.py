"""A broker that is away costs time, never work."""

from __future__ import annotations

import logging

import pytest

from specbatch.pipeline.bootstrap import patient
from specbatch.schemas.records import DueWork, Stage


def test_a_worker_outlives_a_message_that_cannot_be_sent(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: DueWork) -> None:
        raise ConnectionError("broker is away")

    with caplog.at_level(logging.WARNING):
        patient(broken)(DueWork("0123456789", Stage.VERIFY, 3))
    assert "broker is away" in caplog.text


def test_a_message_that_can_be_sent_is_sent_once() -> None:
    enqueued: list[DueWork] = []
    message = DueWork("0123456789", Stage.RECORD, 0)
    patient(enqueued.append)(message)
    assert enqueued == [message]
