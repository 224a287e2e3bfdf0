"""Names and deletes history files: outputs of a tenant's earlier jobs that a job drafts from.

Each job that drafts from history has its own copy in its workspace. The files are only hints, and a
job continues without them (`drafting.py`). So they are deleted with the outputs that they contain,
and at the end of their job. Imports no pyarrow, because a purge needs this module.
"""

from __future__ import annotations

import re

from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.workspace import check_own, delete_own, name_of_attempt
from specbatch.schemas.records import Artefact, JobRow, Lease

HISTORY = "history"  # the artefact's key in a job's report
_FILE = r"history-\d+(-[0-9a-f]+)?\.bin"  # older names had the fencing token alone
_NAME = re.compile(rf"{_FILE}|\.{_FILE}\..*\.tmp")  # or an unfinished one


def name_of(lease: Lease) -> str:
    """The name of the file that is written under this lease."""
    return name_of_attempt("history", lease, "bin")


def is_history(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def delete_reported(objects: Objects, job: JobRow) -> None:
    """Delete the file that the job's report names. Raises `ObjectError`, and `TypeError` for a
    malformed report."""
    if job.report.get(HISTORY):
        artefact = Artefact(**job.report[HISTORY])
        check_own(job, artefact)
        objects.delete(artefact.uri)


def delete_histories(objects: Objects, job: JobRow) -> int:
    """Delete all history files in the job's workspace, and return their number.

    That includes files of lost attempts. Call it for ended jobs only, because a running one may be
    about to report a file. Raises `ObjectError`.
    """
    if job.state.is_final and not job.report.get(HISTORY):
        return 0
    return delete_own(objects, job, is_history)
