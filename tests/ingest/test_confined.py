"""A job's row that names a file of somebody else leads nowhere."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger.builders import new_job

from specbatch.pipeline.ingest.confined import check_own, read_own
from specbatch.pipeline.ingest.objects import Objects, join
from specbatch.pipeline.ledger.memory_store import MemoryStore
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.records import Artefact, JobRow


def job_in(workspace: str) -> JobRow:
    job, _ = MemoryStore().create_job(new_job(workspace_uri=workspace))
    return job


def described(path: Path, uri: str | None = None) -> Artefact:
    """With its right size and checksum, which whoever writes a row may know."""
    data = path.read_bytes()
    return Artefact(uri or str(path), hashlib.sha256(data).hexdigest(), len(data))


def test_a_file_of_the_job_is_read(tmp_path: Path) -> None:
    job = job_in(str(tmp_path / "jobs" / "one"))
    artefact = Objects().put_bytes(join(job.workspace_uri, "prompts-0.arrow"), b"rows")
    assert read_own(Objects(), job, artefact) == b"rows"


def test_files_of_others_are_not(tmp_path: Path) -> None:
    mine, other = tmp_path / "jobs" / "one", tmp_path / "jobs" / "two"
    for folder in (mine, mine / "sub", other):
        folder.mkdir(parents=True)
    secret = other / "results.arrow"
    secret.write_bytes(b"secret")
    (mine / "sub" / "x").write_bytes(b"secret")
    (mine / "link").symlink_to(secret)
    job = job_in(str(mine))
    for uri in (
        str(secret),
        f"file://{secret}",
        f"{mine}/../two/results.arrow",
        f"{mine}//../two/results.arrow",
        f"{mine}/sub/x",
        f"{mine}/link",
        "/etc/hostname",
        f"s3://bucket{secret}",
    ):
        with pytest.raises(ObjectError, match="which is not in its workspace"):
            read_own(Objects(), job, described(secret, uri))


@given(name=st.text(max_size=30))
def test_only_a_plain_name_in_the_workspace_is_one_s_own(name: str) -> None:
    job = job_in("s3://bucket/jobs/one")
    uri = f"s3://bucket/jobs/one/{name}"
    plain = bool(name) and not set(name) & set("/\\\0") and name not in (".", "..")
    try:
        check_own(job, Artefact(uri, "0" * 64, 1))
    except ObjectError:
        assert not plain
    else:
        assert plain


@given(uri=st.text(max_size=60))
def test_no_other_uri_is(uri: str) -> None:
    job = job_in("s3://bucket/jobs/one")
    if uri.rpartition("/")[0] != job.workspace_uri:
        with pytest.raises(ObjectError):
            check_own(job, Artefact(uri, "0" * 64, 1))
