"""No text shows the password of a URL."""

from __future__ import annotations

import logging
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from specbatch.jobs.cli.console import _masked_record
from specbatch.schemas import masking
from specbatch.schemas.errors import DeviceLostError, SpecbatchError, StoreError, UsageError
from specbatch.schemas.masking import mask_url, masked, remember, remember_secrets
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import InputSpec, OutputSpec


@pytest.fixture(autouse=True)
def _forgotten_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else texts of other tests would be masked that happen to hold what was a secret here."""
    monkeypatch.setattr(masking, "_secrets", set())


PASSWORDS = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x24F, exclude_characters=" *"),
    min_size=12,
    max_size=40,
)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@host:6379/0", "redis://user:***@host:6379/0"),
        ("redis://:secret@host/0", "redis://:***@host/0"),
        ("amqps://me:s3:cr@t/x@host//vhost", "amqps://me:***@host//vhost"),
        ("redis://:one@a;redis://:two@b", "redis://:***@b"),
        ("postgresql://me@host/db?password=secret&sslmode=require",
         "postgresql://me@host/db?password=***&sslmode=require"),
        ("postgresql://host/db?sslpassword=secret", "postgresql://host/db?sslpassword=***"),
        ("https://host/a?sv=1&sig=a%2Fb", "https://host/a?sv=1&sig=***"),
        ("https://host/?X-Amz-Security-Token=abc", "https://host/?X-Amz-Security-Token=***"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("sqlite:////folder/file.db", "sqlite:////folder/file.db"),
        ("/a/folder", "/a/folder"),
    ],
)  # fmt: skip
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert mask_url(url) == shown


@given(password=PASSWORDS)
def test_a_remembered_password_is_found_however_it_is_quoted(password: str) -> None:
    url = f"amqp://user:{quote(password, safe='')}@host/vhost"
    remember([url])
    for text in (url, f"cannot reach {url}!", f"AUTH user {password} failed", repr(password)):
        said = masked(text)
        assert quote(password, safe="") not in said
        assert password not in said or password.encode("unicode_escape").decode() != password
    assert password not in mask_url(url)


@given(password=st.from_regex(r"[A-Za-z0-9%._~!$&'()*+,;=-]{12,40}", fullmatch=True))
def test_a_url_that_nobody_told_of_is_found_in_any_text(password: str) -> None:
    said = masked(f"OperationalError: redis://bob:{password}@host:1/0 is away, ask bob@host")
    assert f":{password}@" not in said
    assert said.endswith("@host:1/0 is away, ask bob@host")


def test_short_words_are_not_blacked_out() -> None:
    remember(["amqp://guest:guest@host", "something that is no URL"])
    remember_secrets(["guest"])
    said = "the guest has left something that is no URL; prompt_tokens=5, eos_token=</s>"
    assert masked(said) == said


@pytest.mark.parametrize("kind", [SpecbatchError, UsageError, StoreError, DeviceLostError])
def test_every_error_of_ours_masks_what_it_says(kind: type[SpecbatchError]) -> None:
    assert str(kind("no answer of amqp://a:secret@b")) == "no answer of amqp://a:***@b"


def test_log_records_are_masked_with_their_arguments_and_tracebacks() -> None:
    try:
        raise ConnectionError("redis://:inner-secret@host")
    except ConnectionError as error:
        record = _masked_record(
            "n", logging.ERROR, "f", 1, "lost %s: %d%%", ("redis://:outer@host", 5),
            (ConnectionError, error, error.__traceback__),
        )  # fmt: skip
    text = logging.Formatter().format(record)
    assert "lost redis://:***@host: 5%" in text
    assert "ConnectionError: redis://:***@host" in text
    assert "outer" not in text
    plain = _masked_record("n", logging.ERROR, "f", 1, "a %s", (5,), None)
    assert plain.args == (5,)


def test_settings_remember_what_they_read_and_show_none_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-key-of-the-bucket")
    settings = Settings(
        broker_url="rediss://u:broker%20password@h/0",
        database_url="postgresql://u@h/d?password=database-password",
        s3_endpoint_url="https://u:endpoint-password@h",
    )
    for text in (repr(settings), str(settings.masked), masked("broker password database-password")):
        assert "password" not in text.replace("password=***", "")
    assert masked("SignatureDoesNotMatch: the-key-of-the-bucket") == "SignatureDoesNotMatch: ***"


@pytest.mark.parametrize("uri", ["s3://key:secret@bucket/x", "s3://token@bucket/x"])
def test_what_is_stored_with_a_job_holds_no_credentials(uri: str) -> None:
    for part in (InputSpec, OutputSpec):
        with pytest.raises(ValidationError, match="credentials belong in the environment"):
            part(uri=uri)
    with pytest.raises(ValidationError, match="credentials belong in the environment"):
        Settings(workspace=uri)
    assert InputSpec(uri="s3://bucket/a@b:c").uri == "s3://bucket/a@b:c"
