"""Reads and writes a job's files, and only inside the job's workspace.

The store says where a group's prompts, drafts and results are. If such a row is wrong (edited by
hand or forged), a worker must not read a file of another job, or of the machine, into this job's
output.

If a key is set these files are encrypted, each bound to its job and name. A retry that writes a
file again writes the same bytes. Outputs are not encrypted: they belong to their submitter.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

from specbatch.pipeline.storage.objects import Objects, join, local_path, tidy
from specbatch.schemas.encryption import SETTING, is_encrypted, no_key
from specbatch.schemas.errors import ObjectError, StoreError, UsageError
from specbatch.schemas.records import Artefact, JobRow, Lease

_FRAME_FILE = re.compile(r"[0-9A-Za-z-]+/prompts\.parquet")


def frame_file(workspace: str, name: str) -> str:
    """Where an input that was made of a frame lies. `name`: letters, digits and hyphens."""
    return join(join(workspace, "frames"), f"{name}/prompts.parquet")


def is_frame_file(workspace: str, uri: str) -> bool:
    """Whether an input was made of a frame: it is then the workspace's, and no user's."""
    root = f"{tidy(join(workspace, 'frames'))}/"
    return tidy(uri).startswith(root) and bool(_FRAME_FILE.fullmatch(tidy(uri).removeprefix(root)))


def name_of_attempt(kind: str, lease: Lease, ending: str = "arrow") -> str:
    """A file name that no other attempt has.

    The fencing token alone would not be unique: a store that was restored from a copy gives out the
    same tokens again, and a worker from before could overwrite newer files.
    """
    group = "" if lease.group_index is None else f"-{lease.group_index:08d}"
    return f"{kind}{group}-{lease.token}-{secrets.token_hex(4)}.{ending}"


def put_own(objects: Objects, job: JobRow, name: str, data: bytes) -> Artefact:
    """Write one of the job's files. Raises `UsageError` if a needed key is missing."""
    if objects.cipher is not None:
        data = objects.cipher.encrypt_repeatably(data, _about(job, name))
    elif not job.privacy.is_full:
        raise UsageError(f"files of job {job.job_id} are encrypted: set {SETTING} on its workers")
    return objects.put_bytes(join(job.workspace_uri, name), data)


def read_own(objects: Objects, job: JobRow, artefact: Artefact) -> bytes:
    """Read one of the job's files. Raises `ObjectError` for foreign files and changed bytes."""
    check_own(job, artefact)
    return _opened(objects, job, artefact.uri, objects.get_bytes(artefact.uri, artefact))


def read_own_named(objects: Objects, job: JobRow, uri: str) -> bytes:
    """Read a file that the store does not name: only its encryption shows that it is the job's.

    Raises `ObjectError` for one that is not encrypted.
    """
    data = objects.get_bytes(uri)
    if not is_encrypted(data):
        raise ObjectError(f"{uri} is not encrypted: the workspace was damaged")
    return _opened(objects, job, uri, data)


def delete_own(objects: Objects, job: JobRow, chosen: Callable[[str], bool] | None = None) -> int:
    """Delete all of the job's files, finished or not, or those with a `chosen` name.

    Returns the number of deleted files. Raises `ObjectError` if the job's row names a workspace
    that is not its own.
    """
    if job.workspace_uri.rstrip("/").rpartition("/")[2] != job.job_id:
        raise ObjectError(f"{job.workspace_uri} is not the workspace of job {job.job_id}")
    folder = f"{tidy(job.workspace_uri).rstrip('/')}/"
    if chosen is None:
        objects.abort_uploads(folder)  # first, so that none becomes a file after the listing
    found = [file for file in objects.list(job.workspace_uri) if file.uri.startswith(folder)]
    if chosen is not None:
        found = [file for file in found if chosen(file.uri.removeprefix(folder))]
    for file in found:
        objects.delete(file.uri)
    return len(found)


def _opened(objects: Objects, job: JobRow, uri: str, data: bytes) -> bytes:
    """Decrypt a file. Files from before there was a key are returned unchanged."""
    if not is_encrypted(data):
        return data
    if objects.cipher is None:
        raise no_key(uri)
    try:
        return objects.cipher.decrypt(data, _about(job, uri.rpartition("/")[2]))
    except StoreError as error:
        raise ObjectError(str(error)) from None


def _about(job: JobRow, name: str) -> str:
    return f"{job.job_id}/{name}"


def check_own(job: JobRow, artefact: Artefact) -> None:
    """Raise `ObjectError` unless the file is in the job's workspace, links resolved."""
    name = artefact.uri.rpartition("/")[2]
    plain = name not in ("", ".", "..") and "\\" not in name and "\0" not in name
    own = plain and artefact.uri == join(job.workspace_uri, name)
    if own and not artefact.uri.startswith("s3://"):
        own = not local_path(artefact.uri).is_symlink()
    if not own:
        raise ObjectError(
            f"job {job.job_id} names the file {artefact.uri}, which is not in its workspace "
            f"{job.workspace_uri}: its row in the store is wrong; submit the job again"
        )
