"""Requests and bytes that an attempt is counted for, beside what the store itself saw."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.s3 import PART_BYTES
from specbatch.schemas.usage import Quantities, UsageMeter


@contextmanager
def seen(caplog: pytest.LogCaptureFixture) -> Iterator[Counter[str]]:
    """The requests that the server logged, by method; listings apart."""
    methods: Counter[str] = Counter()
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="werkzeug"):
        yield methods
    for record in caplog.records:
        if record.name == "werkzeug":
            line = re.sub("\x1b\\[[0-9;]*m", "", record.getMessage())  # colours
            method, url = line.partition('"')[2].split()[:2]
            listing = "list-type=" in url or "?uploads&" in url or url.endswith("?uploads")
            methods["LIST" if listing and method.endswith("GET") else method] += 1


def used(meter: UsageMeter) -> Quantities:
    return meter.read()


def test_an_attempt_is_counted_for_the_requests_that_the_store_saw(
    s3: Objects, bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meter = UsageMeter()
    small, large = b"x" * 1000, b"y" * (PART_BYTES + 5)
    (tmp_path / "large").write_bytes(large)
    with seen(caplog) as methods, meter.measuring():
        s3.put_bytes(f"{bucket}/small", small)
        s3.put_file(f"{bucket}/large", tmp_path / "large")
        assert s3.put_new(f"{bucket}/new", b"abc")
        assert not s3.put_new(f"{bucket}/new", b"abc")
        assert s3.get_bytes(f"{bucket}/small") == small
        with s3.open(f"{bucket}/large") as file:
            file.seek(PART_BYTES)
            assert file.read() == b"y" * 5
        assert len(s3.list(bucket)) == 3
        assert s3.head(f"{bucket}/none") is None
        s3.delete(f"{bucket}/small")
    found = used(meter)
    assert found.object_writes == methods["PUT"] + methods["POST"] + methods["LIST"] > 6
    assert found.object_reads == methods["GET"] + methods["HEAD"] > 4
    assert methods["DELETE"] == 1
    assert found.stored_bytes == len(small) + len(large) + 3
    assert found.received_bytes == len(small) + 5
    uploaded = len(small) + len(large) + 3 + 3  # the second `put_new` was refused after its body
    assert uploaded <= found.sent_bytes < uploaded + 2000  # and what names the parts


def test_files_in_folders_are_stored_and_no_request_is_made(tmp_path: Path) -> None:
    meter, objects = UsageMeter(), Objects()
    with meter.measuring():
        objects.put_bytes(str(tmp_path / "a"), b"12345")
        assert objects.put_new(str(tmp_path / "b"), b"123")
        assert not objects.put_new(str(tmp_path / "b"), b"123")
        assert objects.get_bytes(str(tmp_path / "a")) == b"12345"
    found = used(meter)
    assert (found.stored_bytes, found.received_bytes, found.sent_bytes) == (8, 0, 0)
    assert found.object_writes == found.object_reads == 0
