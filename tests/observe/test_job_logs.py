"""Logs by job: what is kept, for how long, how much of it, and that nothing else changes."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specbatch.pipeline.observe.tracing.context import CurrentWork, work_on
from specbatch.pipeline.observe.tracing.job_logs import (
    JobLogs,
    LogReader,
    file_name,
    kept_by_job,
    logs_of,
    logs_root,
    prune,
    workers_in,
    workspace_of,
)
from specbatch.schemas.days import DAY_SEC
from specbatch.schemas.file_modes import Access
from specbatch.schemas.records import Lease, Stage
from support.in_thread import in_thread

JOB = "0123456789abcdef"
LEASE = Lease(JOB, 3, Stage.VERIFY, 7, "host:1", 2)

log = logging.getLogger("specbatch.tests.job_logs")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The job's logs, while this process keeps them as worker `host:1`."""
    with kept_by_job(str(tmp_path), "host:1", 7.0, Access.PRIVATE):
        yield tmp_path / "logs" / JOB


def work_on_it() -> None:
    work_on(CurrentWork.of(LEASE))


def messages(folder: Path, worker: str = "") -> list[str]:
    return [fields["message"] for fields in LogReader(folder, worker).new()]


def test_a_record_is_kept_with_the_job_it_is_about(folder: Path) -> None:
    in_thread(lambda: log.warning("of no job"), work_on_it, lambda: log.warning("%d rows", 3))
    in_thread(lambda: log.warning("named", extra={"job": JOB}))
    in_thread(lambda: log.warning("asked", extra={"request": f"{JOB}/5/0"}))
    assert [path.name for path in folder.parent.iterdir()] == [JOB]
    assert [path.name for path in folder.iterdir()] == ["host-1.jsonl"]
    first, named, asked = LogReader(folder).new()
    assert (first["message"], first["worker"], first["group"]) == ("3 rows", "host:1", 3)
    assert (named["message"], named["worker"]) == ("named", "host-1")
    assert asked["request"] == f"{JOB}/5/0"


@pytest.mark.parametrize("job", ["../../etc", "a/b", "", ".", "x" * 200])
def test_no_id_leads_out_of_the_folder(folder: Path, tmp_path: Path, job: str) -> None:
    in_thread(lambda: log.warning("forged", extra={"job": job}))
    assert not folder.parent.exists()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert logs_of(str(tmp_path), job) is None


def test_only_its_user_reads_it(folder: Path) -> None:
    in_thread(work_on_it, lambda: log.warning("x"))
    for path in (folder.parent, folder, folder / "host-1.jsonl"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077


def test_a_full_file_is_renamed_and_the_one_before_goes(tmp_path: Path) -> None:
    handler = JobLogs(tmp_path / "logs", "host:1", 7.0, Access.PRIVATE, most_bytes=1000)
    for number in range(40):
        record = logging.LogRecord("x", logging.INFO, "", 0, "%d" + "." * 100, (number,), None)
        record.job = JOB
        handler.emit(record)
    folder = tmp_path / "logs" / JOB
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert {*files} <= {"host-1.jsonl", "host-1.jsonl.1"}
    assert sum(files.values()) < 2 * 1500
    numbers = [int(message.rstrip(".")) for message in messages(folder)]
    assert numbers == list(range(numbers[0], 40)), "the last ones, in order"
    assert 4 <= len(numbers) <= 10


def test_a_reader_gives_each_record_once_and_no_half_of_one(tmp_path: Path) -> None:
    handler = JobLogs(tmp_path / "logs", "host:1", 7.0, Access.PRIVATE, most_bytes=1000)

    def emit(numbers: range) -> None:
        for number in numbers:
            record = logging.LogRecord("x", logging.INFO, "", 0, "%d" + "." * 100, (number,), None)
            record.job = JOB
            handler.emit(record)

    folder = tmp_path / "logs" / JOB
    reader = LogReader(folder)

    def new() -> list[int]:
        return [int(fields["message"].rstrip(".")) for fields in reader.new()]

    assert new() == []
    emit(range(2))
    assert new() == [0, 1]
    emit(range(2, 6))  # the file is renamed meanwhile
    assert new() == [2, 3, 4, 5]
    path = folder / "host-1.jsonl"
    whole = path.read_bytes()
    assert whole
    with path.open("ab") as file:
        file.write(whole.splitlines()[-1][:20])
    assert new() == []
    with path.open("ab") as file:
        file.write(whole.splitlines(keepends=True)[-1][20:])
    assert new() == [5]


def test_old_files_go_and_folders_with_them(tmp_path: Path) -> None:
    root, now = tmp_path / "logs", time.time()
    old, new = "0" * 21, "1" * 21
    for name, days in ((old, 8), (new, 6)):
        path = root / name / "host-1.jsonl"
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (now - days * DAY_SEC,) * 2)
    prune(root, now - 9 * DAY_SEC)
    assert len(list(root.iterdir())) == 2
    with kept_by_job(str(tmp_path), "host:1", 7.0, Access.PRIVATE):  # as it begins
        assert [path.name for path in root.iterdir()] == [new]
    prune(tmp_path / "missing", now)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    root, now = tmp_path / "logs", time.time()
    elsewhere = tmp_path / "elsewhere"
    for path in (root / "nginx" / "access.log", root / "0123456789abcdef01234" / "notes.txt",
                 elsewhere / "host-1.jsonl"):  # fmt: skip
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (now - 99 * DAY_SEC,) * 2)
    (root / ("f" * 21)).symlink_to(elsewhere)
    prune(root, now)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3


def test_nothing_is_kept_on_s3_or_for_no_days(tmp_path: Path) -> None:
    assert logs_root("s3://bucket/work") is None
    before = list(logging.getLogger().handlers)
    for workspace, days in (("s3://bucket/work", 7.0), (str(tmp_path), 0.0)):
        with kept_by_job(workspace, "host:1", days, Access.PRIVATE):
            assert logging.getLogger().handlers == before
            in_thread(work_on_it, lambda: log.warning("x"))
    assert list(tmp_path.iterdir()) == []


def test_a_process_keeps_a_record_once(folder: Path, tmp_path: Path) -> None:
    """A demo in a worker's process, for example."""
    with kept_by_job(str(tmp_path), "host:1", 7.0, Access.PRIVATE):
        in_thread(work_on_it, lambda: log.warning("x"))
    in_thread(work_on_it, lambda: log.warning("y"))
    assert messages(folder) == ["x", "y"]


def test_records_of_all_workers_are_read_by_time(tmp_path: Path) -> None:
    folder = tmp_path / JOB
    folder.mkdir()
    for worker, times in (("a:1", (1, 4)), ("b:2", (2, 3))):
        lines = [json.dumps({"time": f"2026-01-0{t}", "message": str(t)}) for t in times]
        (folder / file_name(worker)).write_text("\n".join(lines) + '\n{"time": "2026-0')
    (folder / "b-2.jsonl.1").write_text('{"time": "2026-01-00", "message": "0"}\n[]\n')
    assert messages(folder) == list("01234")
    assert messages(folder, "b:2") == list("023")
    assert messages(folder, "b") == list("023")
    assert workers_in(folder) == ["a-1", "b-2"]
    assert workers_in(tmp_path / "missing") == []


def test_a_jobs_own_workspace_lies_in_the_one_of_its_workers() -> None:
    assert workspace_of("/data/work/jobs/0123/") == "/data/work"
    assert workspace_of("s3://bucket/jobs/jobs/0123") == "s3://bucket/jobs"
    assert workspace_of("file:///work") == ""


def test_what_cannot_be_written_is_dropped_and_never_raises(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    in_thread(work_on_it, lambda: log.warning("x"))
    assert not folder.exists()
    assert "Traceback" not in capsys.readouterr().err


ALONE = """
import logging, sys
from specbatch.pipeline.observe.tracing.job_logs import kept_by_job
from specbatch.schemas.file_modes import Access

with kept_by_job(sys.argv[1], "host:1", 7.0, Access.PRIVATE):
    logging.getLogger("x").warning("kept", extra={"job": "0123456789abcdef"})
    logging.getLogger("x").info("below")
assert not logging.getLogger().handlers
logging.getLogger("x").warning("after")
"""


@pytest.mark.pipeline  # starts a process
def test_warnings_of_a_process_without_handlers_are_still_on_stderr(tmp_path: Path) -> None:
    """Python writes them only as long as there is no handler at all."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stderr == "kept\nafter\n"
    assert messages(tmp_path / "logs" / JOB) == ["kept"]
