"""Files at stores that are only read: `gs://`, `az://`, `abfs://`, `hf://`, `http://`, `https://`.

A `Remote` knows one kind of store. It needs a package of an extra of its own, and takes credentials
from the places where that package looks, never from a uri. What a store says goes into an
`ObjectError`, which passes where the same request may succeed later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar

from specbatch.pipeline.storage.object_store import ObjectInfo, changed, verified
from specbatch.pipeline.storage.ranged import ranged
from specbatch.pipeline.storage.remote_contract import Found, Remote, VersionGoneError
from specbatch.pipeline.storage.retrying import Patience, retrying
from specbatch.schemas import usage
from specbatch.schemas.errors import MissingExtraError, ObjectError, SpecbatchError, first_line
from specbatch.schemas.records import Artefact

T = TypeVar("T")

# Scheme: the extra, and the packages of it that are needed.
EXTRAS = {
    "gs": ("gcs", ("gcsfs",)),
    "az": ("azure", ("adlfs",)),
    "abfs": ("azure", ("adlfs",)),
    "hf": ("hf", ("huggingface_hub",)),
    "http": ("http", ("urllib3",)),
    "https": ("http", ("urllib3",)),
}


def remote_objects(scheme: str, retry_sec: float, scratch: Path | None) -> ReadOnlyObjects:
    """The store of a scheme of `EXTRAS`. Raises `MissingExtraError`.

    `scratch`: where copies lie of files that cannot be read in ranges.
    """
    extra, packages = EXTRAS[scheme]
    if missing := [name for name in packages if find_spec(name) is None]:
        raise MissingExtraError(
            f"{scheme}:// needs {' and '.join(missing)}: pip install 'specbatch[{extra}]'"
        )
    return ReadOnlyObjects(_remote(extra, scratch), retry_sec)


def _remote(extra: str, scratch: Path | None) -> Remote:
    if extra == "http":
        from specbatch.pipeline.storage.remote_http import HttpRemote

        return HttpRemote(scratch)
    if extra == "hf":
        from specbatch.pipeline.storage.remote_hub import HubRemote

        return HubRemote()
    from specbatch.pipeline.storage.remote_fsspec import AzureRemote, GcsRemote

    return GcsRemote() if extra == "gcs" else AzureRemote()


class ReadOnlyObjects:
    """The contract of `object_store.py` over a `Remote`; writing raises `ObjectError`.

    `retry_sec` limits how long failures of one operation may take in all.
    """

    def __init__(self, remote: Remote, retry_sec: float) -> None:
        self._remote = remote
        self._retry_sec = retry_sec

    def get_bytes(self, uri: str, expect: Artefact | None = None) -> bytes:
        with self.open(uri) as file:
            return verified(uri, file.read(), expect)

    def open(self, uri: str, version: str | None = None) -> BinaryIO:
        found = self._look(uri)
        if found is None:
            raise ObjectError(f"cannot read {uri}: no such file")
        if version is not None and found.version != version:
            raise changed(uri)

        def read(start: int, size: int) -> bytes:
            data = self._call("read", uri, lambda: self._remote.read(uri, found, start, size))
            usage.count(received_bytes=len(data))
            return data

        return ranged(found.size, read)

    def list(self, prefix: str) -> list[ObjectInfo]:
        try:
            found = self._call("list", prefix, lambda: self._remote.find(prefix))
        except FileNotFoundError:
            return []
        return [ObjectInfo(uri, one.size, one.version) for uri, one in sorted(found.items())]

    def head(self, uri: str) -> ObjectInfo | None:
        found = self._look(uri)
        return None if found is None else ObjectInfo(uri, found.size, found.version)

    def put_bytes(self, uri: str, data: bytes) -> Artefact:
        del data
        self._refuse(uri)

    def put_file(self, uri: str, local_path: Path, staging: str | None = None) -> Artefact:
        del local_path, staging
        self._refuse(uri)

    def put_new(self, uri: str, data: bytes) -> bool:
        del data
        self._refuse(uri)

    def delete(self, uri: str) -> None:
        self._refuse(uri)

    def is_whole(self, artefact: Artefact) -> bool:
        self._refuse(artefact.uri)

    def move(self, artefact: Artefact, to: str) -> None:
        del artefact
        self._refuse(to)

    def clear(self, folder: str) -> None:
        self._refuse(folder)

    def abort_uploads(self, prefix: str) -> None:
        """Does nothing: nothing is uploaded."""

    def _look(self, uri: str) -> Found | None:
        try:
            return self._call("look at", uri, lambda: self._remote.look(uri))
        except FileNotFoundError:
            return None

    def _refuse(self, uri: str) -> NoReturn:
        raise ObjectError(f"cannot write {uri}: {self._remote.name} is read only; use s3://")

    def _call(self, verb: str, uri: str, request: Callable[[], T]) -> T:
        """Raises `FileNotFoundError` if there is nothing at the uri."""

        def counted() -> T:
            lists = verb == "list"
            usage.count(object_writes=int(lists), object_reads=int(not lists))
            return request()

        try:
            return retrying(is_transient, Patience(self._retry_sec))(counted)
        except (SpecbatchError, FileNotFoundError):
            raise
        except VersionGoneError as error:
            raise changed(uri) from error
        except Exception as error:  # each library raises kinds of its own
            reason = reason_of(error, self._remote)
            raise ObjectError(
                f"cannot {verb} {uri}: {reason}", passing=is_transient(error)
            ) from error


# --- what errors mean ---------------------------------------------------------------------------
# By name, of an error or a class above it: the libraries need not be installed.
_PASSING = {
    *("ClientConnectionError", "ClientPayloadError", "ConnectionError", "TimeoutError"),
    *("TransportError", "ServiceRequestError", "ServiceResponseError", "ProtocolError"),
    *("IncompleteRead", "NewConnectionError", "IncompleteReadError", "SSLError"),
}
_LASTING = {
    *("ClientConnectorCertificateError", "SSLCertVerificationError", "CertificateError"),
    "OfflineModeIsEnabled",
}
_NO_CREDENTIALS = {"DefaultCredentialsError", "CredentialUnavailableError", "RefreshError"}
_DEEPEST = 8


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed a moment later."""
    status = status_of(error)
    if status is not None:
        return status in (408, 425, 429) or (status >= 500 and status != 501)  # 501 is permanent
    names = _names(error)
    return bool(names & _PASSING) and not names & _LASTING


def status_of(error: BaseException) -> int | None:
    """The status of the store's answer; None if it gave none."""
    for one in _chain(error):
        if isinstance(one, PermissionError) or str(one).startswith("Forbidden"):
            return 403
        answer = getattr(one, "response", None)
        for source in (one, answer):
            for name in ("status_code", "status", "code"):
                value = str(getattr(source, name, ""))
                if value.isdigit() and 400 <= int(value) < 600:
                    return int(value)
    return None


def reason_of(error: BaseException, remote: Remote) -> str:
    """Why a request failed, and what to do about it."""
    status, names = status_of(error), _names(error)
    if status in (401, 403):
        return f"{remote.name} denied access ({status}); {remote.remedy}"
    if names & _NO_CREDENTIALS:
        return f"no credentials for {remote.name} found; {remote.remedy}"
    if status is not None:
        return f"{remote.name} answered {status}"
    if "OfflineModeIsEnabled" in names:
        return "HF_HUB_OFFLINE is set; unset it, or name a local copy"
    if names & _LASTING:
        return (
            f"the certificate of {remote.name} is not trusted; set SSL_CERT_FILE to a file with "
            "its authority"
        )
    if names & _PASSING:
        return f"{remote.name} cannot be reached ({type(error).__name__})"
    return first_line(error)


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for one in _chain(error) for kind in type(one).__mro__}


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what caused it."""
    for _ in range(_DEEPEST):
        if error is None:
            return
        yield error
        reason = getattr(error, "reason", None)  # of urllib3's retries
        error = (
            reason if isinstance(reason, BaseException) else error.__cause__ or error.__context__
        )
