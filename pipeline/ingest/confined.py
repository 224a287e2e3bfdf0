"""A job's files are those in its workspace. A row that names another file is not followed there.

The store says where a group's prompts, drafts and results lie. Should that row be wrong (written by
hand, by somebody else, by a message that found a way), a worker must not read a file of another
job, or of the machine, into this job's output.
"""

from __future__ import annotations

from specbatch.pipeline.ingest.objects import Objects, join, local_path
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.records import Artefact, JobRow


def read_own(objects: Objects, job: JobRow, artefact: Artefact) -> bytes:
    """The bytes of one of the job's files. Raises `ObjectError` for any other, or other bytes."""
    check_own(job, artefact)
    return objects.get_bytes(artefact.uri, artefact)


def check_own(job: JobRow, artefact: Artefact) -> None:
    """Raise `ObjectError` unless the file lies in the job's workspace, by name and in truth."""
    name = artefact.uri.rpartition("/")[2]
    plain = name not in ("", ".", "..") and "\\" not in name and "\0" not in name
    own = plain and artefact.uri == join(job.workspace_uri, name)
    if own and not artefact.uri.startswith("s3://"):
        own = not local_path(artefact.uri).is_symlink()
    if not own:
        raise ObjectError(
            f"job {job.job_id} names the file {artefact.uri}, which is not in its workspace "
            f"{job.workspace_uri}: its row in the store is wrong, submit the job anew"
        )
