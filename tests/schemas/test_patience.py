"""How commands wait for servers: told once, in time, with the time at which it ends."""

from __future__ import annotations

import threading

import pytest

from specbatch.schemas import patience
from specbatch.schemas.patience import Asking, NoAnswerError, end_within, patient, patiently


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "NOTICE_SEC", 0.05)
    monkeypatch.setattr(patience, "LEAST_SEC", 0.1)
    monkeypatch.setattr(patience, "_POLL_SEC", 0.01)


def test_a_server_that_answers_is_waited_for_without_a_word() -> None:
    told: list[str] = []

    def work(asking: Asking) -> int:
        asking.answered()
        threading.Event().wait(0.2)
        return 7

    with patient(told.append):
        assert patiently("it", 0.1, work) == 7
    assert told == []


def test_a_server_that_goes_away_after_it_has_answered_is_told_of() -> None:
    told: list[str] = []
    never = threading.Event()

    def work(asking: Asking) -> None:
        asking.answered()
        for _ in range(3):  # asked again, as nothing comes: the time runs from the first of them
            asking.asks()
            never.wait(0.04)
        never.wait()

    with (
        patient(told.append),
        pytest.raises(NoAnswerError, match=r"it did not answer until .* UTC"),
    ):
        patiently("it", 0.3, work)
    never.set()
    assert len(told) == 1
    assert "it does not answer, trying again until" in told[0]


def test_two_servers_are_each_told_of() -> None:
    told: list[str] = []
    never = threading.Event()
    with patient(told.append):
        for name in ("one", "two", "one"):
            with pytest.raises(NoAnswerError):
                patiently(name, 0.15, lambda _: never.wait())
    never.set()
    assert [line.split()[0] for line in told] == ["one", "two"]


def test_work_that_outlives_the_timeout_is_not_called_silent() -> None:
    never = threading.Event()

    def work(asking: Asking) -> None:
        asking.answered()
        never.wait()

    with patient(lambda _: None):
        end_within(0.05)
        with pytest.raises(NoAnswerError, match=r"was still working at .* --timeout ended"):
            patiently("it", 20.0, work)
    never.set()
