"""A job's row that names a file of somebody else leads nowhere."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from contracts.shorthand import ended
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger.builders import JOB, new_job

from specbatch.pipeline.outputs.outputs import OutputWriter
from specbatch.pipeline.runtime.purge import Due, Purger
from specbatch.pipeline.storage.objects import Objects, join
from specbatch.pipeline.storage.workspace import (
    check_own,
    delete_own,
    frame_file,
    is_frame_file,
    read_own,
)
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.records import Artefact, JobRow
from support.databases import sqlite_store
from support.faulty_s3 import Fault, FaultyS3


def job_in(workspace: str) -> JobRow:
    job, _ = sqlite_store().create_job(new_job(workspace_uri=workspace))
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


@pytest.mark.pipeline  # starts processes
@settings(deadline=None)
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


# --- what a killed process was writing ----------------------------------------------------------
def begin(s3_client: Any, bucket: str, *keys: str) -> None:
    """Uploads that nobody will finish, each with a part."""
    name = bucket.removeprefix("s3://")
    for key in keys:
        upload = s3_client.create_multipart_upload(Bucket=name, Key=key)["UploadId"]
        s3_client.upload_part(Bucket=name, Key=key, UploadId=upload, PartNumber=1, Body=b"texts")


def unfinished(s3_client: Any, bucket: str) -> list[str]:
    found = s3_client.list_multipart_uploads(Bucket=bucket.removeprefix("s3://"))
    return [upload["Key"] for upload in found.get("Uploads", [])]


def test_unfinished_uploads_go_with_the_job_s_files_and_no_others(
    s3: Objects, s3_client: Any, bucket: str
) -> None:
    """Their names carry a fencing token: no later upload has the same one, and ends them."""
    others = [f"jobs/{JOB}0/results-00000003-1.arrow", f"jobs/{JOB}.arrow", "jobs/other/a"]
    mine = [f"jobs/{JOB}/results-00000003-{token}.arrow" for token in (1, 1, 2)]
    begin(s3_client, bucket, *others, *mine)
    job = job_in(f"{bucket}/jobs/{JOB}")
    s3.put_bytes(join(job.workspace_uri, "prompts-0.arrow"), b"rows")
    assert delete_own(s3, job) == 1, "files"
    assert sorted(unfinished(s3_client, bucket)) == sorted(others)
    assert s3.list(job.workspace_uri) == []


def test_uploads_of_an_unfinished_publication_go_with_a_purge_of_the_output(
    s3: Objects, s3_client: Any, bucket: str
) -> None:
    store = sqlite_store()
    ended(store, JOB, output_uri=f"{bucket}/out", workspace_uri=f"{bucket}/jobs/{JOB}")
    OutputWriter(s3, f"{bucket}/out", JOB).claim()
    others = ["out/mine.bin", "out/remainder-another.parquet", "out/sub/part-00000.parquet"]
    others += ["out/data/mine.bin"]
    mine = ["out/data/part-00000.parquet", "out/output.jsonl", f"out/remainder-{JOB}.parquet"]
    mine += ["out/part-00000.parquet"]  # of an earlier version
    begin(s3_client, bucket, *others, *mine)
    list(Purger(store, s3, {}).purge(Due(store.get_job(JOB), "asked for"), with_output=True))
    assert sorted(unfinished(s3_client, bucket)) == sorted(others)


@pytest.mark.parametrize("fault", [Fault.DENIED, Fault.NOT_IMPLEMENTED])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_files_go_also_where_uploads_may_not_be_ended(
    s3_server: str, s3_client: Any, bucket: str, method: str, fault: Fault
) -> None:
    job = job_in(f"{bucket}/jobs/{JOB}")
    begin(s3_client, bucket, f"jobs/{JOB}/a")
    with FaultyS3(s3_server) as proxy:
        proxy.fail(fault, method, part="upload")
        objects = Objects(proxy.url)
        objects.put_bytes(join(job.workspace_uri, "prompts-0.arrow"), b"rows")
        assert delete_own(objects, job) == 1
        assert proxy.faults, "that was asked for"
        assert objects.list(job.workspace_uri) == []


def test_uploads_that_cannot_be_ended_now_are_told_of(
    s3_server: str, s3_client: Any, bucket: str
) -> None:
    """Whoever purges does it again, and finds the files still there."""
    job = job_in(f"{bucket}/jobs/{JOB}")
    begin(s3_client, bucket, f"jobs/{JOB}/a")
    with FaultyS3(s3_server) as proxy:
        objects = Objects(proxy.url, s3_retry_sec=0.0)
        objects.put_bytes(join(job.workspace_uri, "prompts-0.arrow"), b"rows")
        proxy.fail(Fault.UNAVAILABLE, "DELETE", part="uploadId=", times=99)
        with pytest.raises(ObjectError, match="cannot abort the upload of"):
            delete_own(objects, job)
        proxy.heal()
        assert delete_own(objects, job) == 1
    assert unfinished(s3_client, bucket) == []


def test_a_local_temporary_of_a_killed_process_goes_as_a_file(tmp_path: Path) -> None:
    job = job_in(str(tmp_path / JOB))
    (tmp_path / JOB).mkdir()
    (tmp_path / JOB / ".results-00000003-1.arrow.0a1b.tmp").write_bytes(b"texts")
    assert delete_own(Objects(), job) == 1
    assert list((tmp_path / JOB).iterdir()) == []


@pytest.mark.parametrize("workspace", ["/work", "s3://bucket/work"])
def test_a_frames_file_is_known_and_nothing_else_is(workspace: str) -> None:
    assert is_frame_file(workspace, frame_file(workspace, "ab12-1"))
    for name in (
        "prompts.parquet",
        "ab/other.parquet",
        "../prompts.parquet",
        "a/../prompts.parquet",
    ):
        assert not is_frame_file(workspace, f"{workspace}/frames/{name}")
    assert not is_frame_file("/elsewhere", frame_file(workspace, "ab12-1"))
