"""Files by uri: a local path, `s3://bucket/key` or a store that is only read, behind the same few
operations.

Knows nothing of the files' contents. A write is atomic: readers never see half a file. Versions are
the ETag (S3), size and mtime (local) or what `remote.py` says, so readers notice a changed file.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from specbatch.pipeline.storage.object_store import (
    ObjectInfo,
    ObjectStore,
    changed,
    explained,
    verified,
)
from specbatch.schemas import usage
from specbatch.schemas.encryption import Cipher
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.file_modes import Access, make_folder, new_file
from specbatch.schemas.records import Artefact
from specbatch.schemas.refusals import REFUSALS
from specbatch.schemas.schemes import READ_ONLY
from specbatch.schemas.settings import Settings

CHUNK_BYTES = 4 << 20
PROBE_BYTES = 4 << 20  # what a group's results seldom exceed
ASKED_RETRY_SEC = 10.0  # how long S3 may fail while a user waits for an answer


class Objects:
    """All stores at once, chosen by the uri's scheme. Thread-safe; clients are made when needed.

    `scratch` is a folder for temporary files (default: the system's). `cipher` is for jobs' own
    files (`workspace.py`); nothing here uses it. `s3_retry_sec` limits how long failures of one
    operation on S3 or another remote store may take in all.
    """

    def __init__(
        self,
        s3_endpoint_url: str | None = None,
        scratch: str | Path | None = None,
        cipher: Cipher | None = None,
        s3_retry_sec: float = 120.0,
        local: LocalObjects | None = None,
    ):
        self.cipher = cipher
        self.s3_endpoint_url = s3_endpoint_url
        self._s3_retry_sec = s3_retry_sec
        self._scratch = Path(scratch) if scratch else None
        self._local: ObjectStore = local or LocalObjects()
        self._remote: dict[str, ObjectStore] = {}  # by scheme
        self._lock = threading.Lock()

    @classmethod
    def of_settings(cls, settings: Settings, s3_retry_sec: float = 120.0) -> Objects:
        """The objects of an installation; a key in the settings encrypts jobs' own files."""
        cipher = Cipher.of_setting(settings.encryption_key)
        workspace = None if "://" in settings.workspace else Path(settings.workspace)
        local = LocalObjects(settings.output_mode, workspace, settings.store_mode)
        return cls(settings.s3_endpoint_url, None, cipher, s3_retry_sec, local)

    def put_bytes(self, uri: str, data: bytes) -> Artefact:
        return _stored(self._store(uri).put_bytes(uri, data))

    def put_file(self, uri: str, local_path: Path, staging: str | None = None) -> Artefact:
        return _stored(self._store(uri).put_file(uri, local_path, staging))

    def put_new(self, uri: str, data: bytes) -> bool:
        is_new = self._store(uri).put_new(uri, data)
        usage.count(stored_bytes=len(data) if is_new else 0)
        return is_new

    def get_bytes(self, uri: str, expect: Artefact | None = None) -> bytes:
        return self._store(uri).get_bytes(uri, expect)

    def open(self, uri: str, version: str | None = None) -> BinaryIO:
        return self._store(uri).open(uri, version)

    def list(self, prefix: str) -> list[ObjectInfo]:
        return self._store(prefix).list(prefix)

    def head(self, uri: str) -> ObjectInfo | None:
        return self._store(uri).head(uri)

    def exists(self, uri: str) -> bool:
        """Whether a file (not a folder) exists."""
        return self.head(uri) is not None

    def delete(self, uri: str) -> None:
        self._store(uri).delete(uri)

    def is_whole(self, artefact: Artefact) -> bool:
        return self._store(artefact.uri).is_whole(artefact)

    def move(self, artefact: Artefact, to: str) -> None:
        self._store(to).move(artefact, to)

    def clear(self, folder: str) -> None:
        self._store(folder).clear(folder)

    def abort_uploads(self, prefix: str) -> None:
        self._store(prefix).abort_uploads(prefix)

    @contextmanager
    def temp_folder(self) -> Iterator[Path]:
        """A fresh local folder that is removed at the end of the block."""
        root = self._scratch or Path(tempfile.gettempdir())
        with explained("write", str(root)):
            root.mkdir(parents=True, exist_ok=True)
            folder = tempfile.TemporaryDirectory(prefix="specbatch-", dir=root)
        with folder as path, explained("write", str(root), REFUSALS):
            yield Path(path)

    def _store(self, uri: str) -> ObjectStore:
        scheme = uri.partition("://")[0] if "://" in uri else "file"
        if scheme == "file":
            return self._local
        with self._lock:
            if scheme not in self._remote:
                self._remote[scheme] = self._made(scheme)
            return self._remote[scheme]

    def _made(self, scheme: str) -> ObjectStore:
        if scheme == "s3":
            from specbatch.pipeline.storage.s3 import S3Objects

            return S3Objects(self.s3_endpoint_url, self._s3_retry_sec)
        if scheme not in READ_ONLY:
            raise ObjectError(
                f"`{scheme}://` is not supported; use a local path, s3://, "
                f"{', '.join(f'{one}://' for one in READ_ONLY[:-1])} or {READ_ONLY[-1]}://"
            )
        from specbatch.pipeline.storage.remote import remote_objects

        return remote_objects(scheme, self._s3_retry_sec, self._scratch)


def _stored(artefact: Artefact) -> Artefact:
    """Count a written file for the attempt that wrote it."""
    usage.count(stored_bytes=artefact.size_bytes)
    return artefact


class LocalObjects:
    """Files in folders: written to a temporary neighbour, synced, then renamed into place.

    `access` decides who may read them, and `store_access` decides for the folder `store`.
    """

    def __init__(
        self,
        access: Access = Access.UMASK,
        store: Path | None = None,
        store_access: Access = Access.PRIVATE,
    ) -> None:
        self._access = access
        self._store = store
        self._store_access = store_access

    def put_bytes(self, uri: str, data: bytes) -> Artefact:
        return self._put(uri, io.BytesIO(data))

    def put_file(self, uri: str, local_path: Path, staging: str | None = None) -> Artefact:
        with explained("write", uri), local_path.open("rb") as source:
            return self._put(uri, source, staging)

    def put_new(self, uri: str, data: bytes) -> bool:
        path = local_path(uri)
        with explained("write", uri), self._temporary(path, io.BytesIO(data)) as (temporary, _):
            try:
                path.hardlink_to(temporary)  # unlike a rename, refuses to replace
            except FileExistsError:
                return False
            except OSError:  # a file system without hard links
                if not _rename_new(temporary, path):
                    return False
            sync_folder(path.parent)
        return True

    def get_bytes(self, uri: str, expect: Artefact | None = None) -> bytes:
        with explained("read", uri):
            data = local_path(uri).read_bytes()
        return verified(uri, data, expect)

    def open(self, uri: str, version: str | None = None) -> BinaryIO:
        with explained("read", uri):
            file = local_path(uri).open("rb")
        if version is not None and _version(os.fstat(file.fileno())) != version:
            file.close()
            raise changed(uri)
        return file

    def list(self, prefix: str) -> list[ObjectInfo]:
        root = local_path(prefix)
        with explained("list", prefix):
            if root.is_file():
                return [_info(root)]
            return [_info(p) for p in sorted(files_below(root), key=str)]

    def head(self, uri: str) -> ObjectInfo | None:
        path = local_path(uri)
        with explained("look at", uri):
            return _info(path) if path.is_file() else None

    def delete(self, uri: str) -> None:
        with explained("delete", uri):
            local_path(uri).unlink(missing_ok=True)

    def is_whole(self, artefact: Artefact) -> bool:
        path = local_path(artefact.uri)
        with explained("read", artefact.uri):
            if not path.is_file() or path.stat().st_size != artefact.size_bytes:
                return False
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == artefact.sha256

    def move(self, artefact: Artefact, to: str) -> None:
        path, place = local_path(artefact.uri), local_path(to)
        with explained("write", to):
            self._make_folder(place)
            path.replace(place)
            sync_folder(place.parent)
            sync_folder(path.parent)

    def clear(self, folder: str) -> None:
        path = local_path(folder)
        with explained("delete", folder):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)  # a writer may just add or delete a file
            if path.is_dir():
                shutil.rmtree(path)

    def abort_uploads(self, prefix: str) -> None:
        """Does nothing: listings include temporary files that a process left behind."""

    def _put(self, uri: str, source: BinaryIO, staging: str | None = None) -> Artefact:
        path = local_path(uri)
        beside = local_path(staging) / path.name if staging is not None else path
        with explained("write", uri), self._temporary(beside, source) as (temporary, artefact):
            if staging is not None:
                self._make_folder(path)
            temporary.replace(path)
            sync_folder(path.parent)
        return Artefact(uri, artefact.sha256, artefact.size_bytes)

    @contextmanager
    def _temporary(self, path: Path, source: BinaryIO) -> Iterator[tuple[Path, Artefact]]:
        """A synced copy of `source` beside `path`, removed at the end if it still exists."""
        access = self._make_folder(path)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        digest, size = hashlib.sha256(), 0
        try:
            with new_file(temporary, access) as file:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    size += len(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            yield temporary, Artefact(str(path), digest.hexdigest(), size)
        finally:
            temporary.unlink(missing_ok=True)

    def _make_folder(self, path: Path) -> Access:
        """Make a file's folder; returns who may read the file."""
        is_own = self._store is not None and self._store in path.parents
        access = self._store_access if is_own else self._access
        make_folder(path.parent, access, self._store if is_own else None)
        return access


def local_path(uri: str) -> Path:
    """The path of a local uri (`file://` is optional)."""
    return Path(uri.removeprefix("file://"))


def files_below(folder: Path, is_entered: Callable[[str], bool] = lambda _: True) -> Iterator[Path]:
    """Files of a local folder at any depth, in no order; none if the folder is missing.

    Skips linked subfolders and those that `is_entered` excludes by name. Raises `ObjectError` for a
    subfolder without read permission.
    """
    if not folder.is_dir():
        return
    for path, subfolders, names in os.walk(folder, onerror=_cannot_list):
        subfolders[:] = filter(is_entered, subfolders)
        yield from (file for name in names if (file := Path(path, name)).is_file())


def _cannot_list(error: OSError) -> None:
    with explained("list", str(error.filename)):
        raise error


def tidy(uri: str) -> str:
    """The form in which `list` and `head` name a file: no `file://`, `./` or doubled slashes."""
    return uri if "://" in uri and not uri.startswith("file://") else str(local_path(uri))


def join(uri: str, name: str) -> str:
    """`uri` as a folder or prefix, plus `name`."""
    return f"{uri.rstrip('/')}/{name}"


def is_unchanged(file: BinaryIO, info: ObjectInfo) -> bool:
    """Whether an open file is unchanged. Of remote stores every read asks for the version; a local
    file that was replaced stays complete for processes that have it open."""
    return "://" in info.uri or _version(os.fstat(file.fileno())) == info.version


def _rename_new(temporary: Path, path: Path) -> bool:
    """Rename a file unless the name is taken. The rename is atomic, so a crash leaves no half file.

    Writers take turns with a lock on the folder, which ends with its process. If the file system
    has no such locks, or does not share them between machines, two simultaneous writers may both
    be told that they won. The later file stays then, and it is complete.
    """
    with _locked(path.parent):
        if path.exists():
            return False
        temporary.rename(path)
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of `_locked` blocks on a local folder."""
    if os.name == "nt":  # a rename does not replace there
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut, if the system can."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _info(path: Path) -> ObjectInfo:
    stat = path.stat()
    return ObjectInfo(str(path), stat.st_size, _version(stat))


def _version(stat: os.stat_result) -> str:
    return f"{stat.st_size}-{stat.st_mtime_ns}"


def probe(objects: Objects, folder: str) -> None:
    """Raise `ObjectError` unless a file as large as a group's results can be written here."""
    uri = join(folder, f"probe-{uuid.uuid4().hex}")
    try:
        objects.put_bytes(uri, bytes(PROBE_BYTES))
    finally:
        objects.delete(uri)
