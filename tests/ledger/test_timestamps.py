"""Time stamps: what an authority proves, and what is said where it proves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from specbatch.pipeline.audit.timestamps import Timestamps
from specbatch.schemas.errors import ObjectError, UsageError
from specbatch.schemas.settings import Settings
from support.timestamping import Authority, authority

STATEMENT = b'{"job": "job-1", "number": 7}'


@pytest.fixture(scope="module")
def tsa(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Authority]:
    with authority(tmp_path_factory.mktemp("time") / "tsa") as running:
        yield running


def asking(tsa: Authority, roots: Any = None) -> Timestamps:
    settings = Settings(timestamp_url=tsa.url, timestamp_roots=str(roots or ""))
    found = Timestamps.of_settings(settings)
    assert found is not None
    return found


def test_a_stamp_proves_when_and_by_whom_and_of_which_statement(tsa: Authority) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    stamps = asking(tsa, tsa.roots)
    assert (stamps.asks, stamps.checks) == (True, True)
    stamp = stamps.stamp(STATEMENT)
    checked = stamps.check(stamp, STATEMENT)
    assert isinstance(checked, tuple), checked
    when, signer = checked
    assert before <= datetime.fromisoformat(when) <= datetime.now(UTC)
    assert when.endswith("+00:00")
    assert "CN=time stamps" in signer or "CN=root of time" in signer
    assert isinstance(stamps.check(stamp, STATEMENT + b" "), str), "of another statement"
    assert isinstance(stamps.check(stamp[:-1], STATEMENT), str)


def test_a_stamp_of_another_authority_is_no_proof(tsa: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    stamp = asking(tsa).stamp(STATEMENT)
    assert isinstance(asking(tsa, tsa.roots).check(stamp, STATEMENT), tuple)
    assert isinstance(asking(tsa, other.roots).check(stamp, STATEMENT), str)
    with pytest.raises(ObjectError, match="gave no time stamp"):
        asking(tsa, other.roots).stamp(STATEMENT)


@pytest.mark.parametrize(
    ("status", "why", "passing"),
    [
        (400, "refuses with HTTP status 400", False),
        (404, "refuses with HTTP status 404", False),
        (408, "refuses with HTTP status 408", True),
        (429, "refuses with HTTP status 429", True),
        (499, "refuses with HTTP status 499", False),
        (500, "refuses with HTTP status 500", True),
        (503, "refuses with HTTP status 503", True),
        (None, "does not answer: ", True),
    ],
)
def test_an_authority_that_stamps_nothing_is_asked_again_where_that_may_pass(
    tsa: Authority, status: int | None, why: str, passing: bool
) -> None:
    tsa.status = status
    try:
        with pytest.raises(ObjectError, match=why) as refused:
            asking(tsa).stamp(STATEMENT)
    finally:
        tsa.status = 200
    assert refused.value.passing is passing
    assert tsa.url in str(refused.value)


def test_an_authority_that_is_not_there_may_come_back(tsa: Authority) -> None:
    nobody = Timestamps("http://127.0.0.1:9", ())
    with pytest.raises(ObjectError, match="does not answer") as refused:
        nobody.stamp(STATEMENT)
    assert refused.value.passing
    assert tsa.status == 200


def test_what_is_no_stamp_is_refused_without_any_root_too(
    tsa: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tsa, "stamp", lambda _: b"no stamp")
    with pytest.raises(ObjectError, match="gave no time stamp"):
        asking(tsa).stamp(STATEMENT)


def test_a_refusal_in_the_answer_is_told_in_the_authoritys_words(
    tsa: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = tsa.stamp
    monkeypatch.setattr(tsa, "stamp", lambda _: grant(b"nobody can read this"))
    with pytest.raises(ObjectError, match=r"gave no time stamp: .+"):
        asking(tsa).stamp(STATEMENT)


def test_settings_name_an_authority_by_its_address_and_may_only_check(tmp_path: Path) -> None:
    assert Timestamps.of_settings(Settings()) is None
    with pytest.raises(UsageError, match="must begin with http"):
        Timestamps.of_settings(Settings(timestamp_url="tsa.example"))
    other = Authority(tmp_path / "other")
    only_checks = Timestamps.of_settings(Settings(timestamp_roots=str(other.roots)))
    assert only_checks is not None
    assert (only_checks.asks, only_checks.checks) == (False, True)
    for url in ("http://tsa.example", "https://tsa.example"):
        only_asks = Timestamps.of_settings(Settings(timestamp_url=url))
        assert only_asks is not None
        assert (only_asks.asks, only_asks.checks) == (True, False)
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    for path in (wrong, tmp_path / "nowhere.pem"):
        with pytest.raises(UsageError, match="cannot be read as PEM"):
            Timestamps.of_settings(Settings(timestamp_roots=str(path)))
