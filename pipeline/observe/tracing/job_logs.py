"""What workers log about a job, kept for some days: WORKSPACE/logs/JOB/WORKER.jsonl.

One JSON object per line, as `logs.py` has them, for each record whose thread works on a job or that
names one. A file that is full is renamed to `.jsonl.1`, in place of the one before. Only workspaces
in a folder have these files: an object on S3 cannot be appended to. A record that cannot be written
is not kept; the worker's console has it.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from specbatch.pipeline.observe.tracing.logs import JsonFormatter, job_of
from specbatch.schemas.days import DAY_SEC
from specbatch.schemas.file_modes import Access, append_to, make_folder

FOLDER = "logs"
MOST_BYTES = 2 << 20  # of a file; there are two of them for a job and worker
PRUNE_EVERY_SEC = 3600.0
_FULL = ".1"  # ends the name of a file that is not written any more
_SUFFIX = ".jsonl"
_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,127}")  # what may be a folder's name
_OURS = re.compile(r"[0-9a-f]{16,32}")  # ids that jobs are given: other folders are others'

Fields = Mapping[str, Any]


def logs_root(workspace: str) -> Path | None:
    """The folder of all jobs' logs; None for a workspace that is not a local folder."""
    return None if "://" in workspace else Path(workspace) / FOLDER


def logs_of(workspace: str, job_id: str) -> Path | None:
    """The folder of a job's logs. None for a workspace or an id that cannot have one."""
    root = logs_root(workspace)
    return None if root is None or not _ID.fullmatch(job_id) else root / job_id


def workspace_of(job_workspace: str) -> str:
    """The workspace that holds a job's own one, `WORKSPACE/jobs/JOB`."""
    return job_workspace.rstrip("/").rpartition("/jobs/")[0]


class JobLogs(logging.Handler):
    """Writes records to the files of their jobs. Thread-safe; never raises."""

    def __init__(
        self, root: Path, worker: str, days: float, access: Access, most_bytes: int = MOST_BYTES
    ) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self._root = root
        self._name_of_file = file_name(worker)
        self._keep_sec = days * DAY_SEC
        self._access = access
        self._most_bytes = most_bytes
        self._prune_at = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            job_id = job_of(record)
            if job_id is None or not _ID.fullmatch(job_id):
                return
            line = f"{self.format(record)}\n".encode("utf-8", errors="replace")
            with suppress(OSError):
                self._write(self._root / job_id / self._name_of_file, line)
                self._prune(time.time())
        except Exception:  # as every handler does: an error in logging must not end the work
            self.handleError(record)

    def _write(self, path: Path, line: bytes) -> None:
        try:
            descriptor = append_to(path, self._access)
        except FileNotFoundError:  # the job's first record, or its folder was just pruned
            make_folder(path.parent, self._access, self._root.parent)
            descriptor = append_to(path, self._access)
        try:
            os.write(descriptor, line)  # one call: no other process writes into it
            is_full = os.fstat(descriptor).st_size >= self._most_bytes
        finally:
            os.close(descriptor)
        if is_full:
            path.replace(path.with_name(path.name + _FULL))

    def _prune(self, now: float) -> None:
        """Now and then, delete files that nobody has written to for long."""
        if now < self._prune_at:
            return
        self._prune_at = now + PRUNE_EVERY_SEC
        prune(self._root, now - self._keep_sec)


def prune(root: Path, before: float) -> None:
    """Delete files that were last written before this time, and folders that are empty then.

    A workspace may have a folder `logs` with other files in it: those are left alone.
    """
    for folder in root.iterdir() if root.is_dir() else ():
        if not _OURS.fullmatch(folder.name) or folder.is_symlink():
            continue
        with suppress(OSError):  # another worker deletes as well
            for path in _files(folder):
                if path.lstat().st_mtime < before:
                    path.unlink(missing_ok=True)
            folder.rmdir()  # raises unless it is empty


@contextmanager
def kept_by_job(workspace: str, worker: str, days: float, access: Access) -> Iterator[None]:
    """Keep what this process logs in the block, for so many days; 0 keeps nothing.

    Where the process has no handler of its own, Python writes warnings to stderr. It still does.
    """
    root, logger = logs_root(workspace), logging.getLogger()
    if root is None or not days or any(isinstance(h, JobLogs) for h in logger.handlers):
        yield
        return
    mine: list[logging.Handler] = [JobLogs(root, worker, days, access)]
    if not logger.handlers and logging.lastResort is not None:
        mine.append(logging.lastResort)  # Python's own, which one handler would silence
    with suppress(OSError):
        prune(root, time.time() - days * DAY_SEC)
    for handler in mine:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in mine:
            logger.removeHandler(handler)


# --- reading them ---------------------------------------------------------------------------------


def file_name(worker: str) -> str:
    """The file of a worker `host:process`."""
    return re.sub(r"[^0-9A-Za-z._-]", "-", worker) + _SUFFIX


def workers_in(folder: Path) -> list[str]:
    """Names of the workers that have logged, as their files have them."""
    return sorted({_worker(path) for path in _files(folder)})


class LogReader:
    """Reads a job's records by time, of workers whose name contains `worker`; a line at a time.

    `worker` of a record is the one whose file it is in, unless it names one.
    """

    def __init__(self, folder: Path, worker: str = "") -> None:
        self._folder = folder
        self._wanted = file_name(worker).removesuffix(_SUFFIX)
        self._read: dict[int, int] = {}  # bytes, by inode: a file that is full is renamed

    def new(self) -> Iterator[Fields]:
        """Those that came since the call before; the first call gives all."""
        names = [name for name in workers_in(self._folder) if self._wanted in name]
        return heapq.merge(*map(self._of_worker, names), key=itemgetter("time"))

    def _of_worker(self, worker: str) -> Iterator[Fields]:
        for ending in (_SUFFIX + _FULL, _SUFFIX):
            with suppress(FileNotFoundError), (self._folder / f"{worker}{ending}").open("rb") as f:
                for line in self._lines(f):
                    with suppress(ValueError):  # a line that a full disk has cut
                        fields = json.loads(line)
                        if isinstance(fields, dict) and isinstance(fields.get("time"), str):
                            yield {"worker": worker} | fields

    def _lines(self, file: IO[bytes]) -> Iterator[bytes]:
        """Whole lines: the rest of one that is being written comes with the next call."""
        status = os.fstat(file.fileno())
        at = self._read.get(status.st_ino, 0)
        if at > status.st_size:  # another file, to which the system has given the number again
            at = 0
        file.seek(at)
        for line in file:
            if not line.endswith(b"\n"):
                return
            at += len(line)
            self._read[status.st_ino] = at
            yield line


def _files(folder: Path) -> list[Path]:
    endings = (_SUFFIX, _SUFFIX + _FULL)
    return [p for p in folder.iterdir() if p.name.endswith(endings)] if folder.is_dir() else []


def _worker(path: Path) -> str:
    return path.name.removesuffix(_FULL).removesuffix(_SUFFIX)
