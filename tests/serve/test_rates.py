"""How many requests a key may send: counted for each key, told with the time to wait."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from serve.conftest import serving

from specbatch.jobs.serve.models import ServedModel
from specbatch.jobs.serve.rates import Rate, Rates, rate_of
from specbatch.schemas.errors import UsageError
from specbatch.schemas.serving import Scope


class Clock:
    """Seconds that only the test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_as_many_as_allowed_pass_at_once_and_then_one_each_interval() -> None:
    clock = Clock()
    rates = Rates(Rate(6, 60.0), clock)
    assert [rates.wait_sec("a") for _ in range(6)] == [0.0] * 6
    assert rates.wait_sec("a") == pytest.approx(10.0)
    clock.now += 9.0
    assert rates.wait_sec("a") == pytest.approx(1.0)  # what was refused is not counted
    clock.now += 1.0
    assert rates.wait_sec("a") == 0.0
    assert rates.wait_sec("a") == pytest.approx(10.0)
    clock.now += 600.0  # no more than a full bucket
    assert [rates.wait_sec("a") for _ in range(6)] == [0.0] * 6
    assert rates.wait_sec("a") > 0.0


def test_who_waits_as_long_as_it_is_told_passes() -> None:
    clock = Clock()
    for requests in (1, 7, 600, 999_999_999):
        rates = Rates(Rate(requests, 60.0), clock)
        for _ in range(min(requests, 1000)):
            assert rates.wait_sec("a") == 0.0
        if requests <= 1000:
            clock.now += rates.wait_sec("a")
            assert rates.wait_sec("a") == 0.0


def test_one_key_takes_nothing_from_another() -> None:
    rates = Rates(Rate(2, 60.0), Clock())
    assert [rates.wait_sec("greedy") > 0 for _ in range(50)] == [False] * 2 + [True] * 48
    assert [rates.wait_sec("modest") for _ in range(2)] == [0.0, 0.0]


def test_threads_at_once_do_not_pass_more() -> None:
    rates = Rates(Rate(100, 3600.0), Clock())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            waits = list(threads.map(rates.wait_sec, ["a"] * 400))
    finally:
        sys.setswitchinterval(interval)
    assert waits.count(0.0) == 100


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("5/second", Rate(5, 1.0)),
        ("600/minute", Rate(600, 60.0)),
        ("1/hour", Rate(1, 3600.0)),
        ("off", None),
    ],
)
def test_a_rate_is_written_with_its_unit(text: str, rate: Rate | None) -> None:
    assert rate_of(text) == rate


@pytest.mark.parametrize("text", ["", "600", "0/minute", "-1/minute", "5/day", "5 / minute", "OFF"])
def test_anything_else_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="per second, minute or hour, or off"):
        rate_of(text)


def test_a_service_without_keys_has_one_count(tmp_path: Path) -> None:
    models = {"small": ServedModel("small", {"verifier": "models/small"}, tmp_path)}
    limit = Rates(Rate(1, 3600.0))
    with serving(tmp_path / "serve-dir", models, rates=limit, with_keys=False) as served:
        served.client("any").models.list()
        with pytest.raises(openai.RateLimitError, match="no more than 1 requests in 3600 s"):
            served.client("another").models.list()


def test_a_client_above_its_rate_is_told_when_to_come_back(tmp_path: Path) -> None:
    models = {"small": ServedModel("small", {"verifier": "models/small"}, tmp_path)}
    with serving(tmp_path / "serve-dir", models, rates=Rates(Rate(3, 3600.0))) as served:
        client, other = served.client(), served.client()
        for _ in range(3):
            client.models.list()
        with pytest.raises(openai.RateLimitError, match="3 requests in 3600 s") as caught:
            client.files.list()
        assert caught.value.code == "rate_limit_exceeded"
        assert 1100 <= int(caught.value.response.headers["retry-after"]) <= 1200
        other.files.list()  # another key of the same tenant
        with pytest.raises(openai.AuthenticationError):  # who has none is told that first
            served.client("sb-none").files.list()


def test_what_a_key_may_not_do_counts_too(tmp_path: Path) -> None:
    models = {"small": ServedModel("small", {"verifier": "models/small"}, tmp_path)}
    with serving(tmp_path / "serve-dir", models, rates=Rates(Rate(1, 3600.0))) as served:
        writer = served.client(served.key("default", Scope.WRITE))
        with pytest.raises(openai.PermissionDeniedError):
            writer.files.list()
        with pytest.raises(openai.RateLimitError):
            writer.files.list()
