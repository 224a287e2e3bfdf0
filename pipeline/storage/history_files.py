"""The files of what a tenant's earlier jobs gave, one in the workspace of each job that drafts from
it: how they are called, and their end.

They are hints: a job goes on without (`drafting.py`). So they go with the outputs that they were
made of, and with the end of the job that they are for. Imports no pyarrow: a purge needs it.
"""

from __future__ import annotations

import re

from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.workspace import check_own, delete_own, name_of_attempt
from specbatch.schemas.records import Artefact, JobRow, Lease

HISTORY = "history"  # of a job's report: the artefact
_FILE = r"history-\d+(-[0-9a-f]+)?\.bin"  # older ones were named by the lease's number alone
_NAME = re.compile(rf"{_FILE}|\.{_FILE}\..*\.tmp")  # or an unfinished one


def name_of(lease: Lease) -> str:
    """Of the file that is written under this lease."""
    return name_of_attempt("history", lease, "bin")


def is_history(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def delete_reported(objects: Objects, job: JobRow) -> None:
    """Delete the one that the job's report tells of. Raises `ObjectError`, and `TypeError` for a
    report that tells of something else."""
    if job.report.get(HISTORY):
        artefact = Artefact(**job.report[HISTORY])
        check_own(job, artefact)
        objects.delete(artefact.uri)


def delete_histories(objects: Objects, job: JobRow) -> int:
    """Delete all that are in the job's workspace, those of lost attempts too; how many were.

    Who has not ended may be about to report one. Raises `ObjectError`.
    """
    if job.state.is_final and not job.report.get(HISTORY):
        return 0
    return delete_own(objects, job, is_history)
