"""`gs://`, `az://` and `abfs://`, through fsspec's file systems of these stores.

Each reads exactly the version that was found, a generation or an ETag. Each process makes its
client at first use, never before a fork.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, cast

from specbatch.pipeline.storage.remote_contract import Found, VersionGoneError

ANSWER_SEC = 60.0
_NONE_FOUND = 404
_CHANGED = 412


class _PerProcess:
    """Something that does not survive a fork."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: Any = None
        self._pid = -1
        self._lock = threading.Lock()

    def __call__(self) -> Any:
        with self._lock:
            if self._pid != os.getpid():
                self._made, self._pid = self._make(), os.getpid()
            return self._made


class GcsRemote:
    name = "Google Cloud Storage"
    remedy = "set GOOGLE_APPLICATION_CREDENTIALS to a key that may read the bucket"

    def __init__(self) -> None:
        self._fs = _PerProcess(_google)

    def look(self, uri: str) -> Found | None:
        info = self._fs().info(uri)
        return _generation(info) if info["type"] == "file" else None

    def find(self, folder: str) -> dict[str, Found]:
        listed = self._fs().find(folder, detail=True)
        return {
            f"gs://{info['name']}": _generation(info)
            for info in listed.values()
            if not info["name"].endswith("/")
        }

    def read(self, uri: str, found: Found, start: int, size: int) -> bytes:
        try:
            data = self._fs().cat_file(uri, start=start, end=start + size, generation=found.version)
        except FileNotFoundError:
            raise VersionGoneError from None
        return cast(bytes, data)


def _google() -> Any:
    import google.auth
    from gcsfs.core import GCSFileSystem  # its extended one asks Google about the bucket first
    from google.auth.exceptions import DefaultCredentialsError

    token: Any = "anon"
    if not os.environ.get("STORAGE_EMULATOR_HOST"):
        try:
            token, _ = google.auth.default(
                scopes=["https://www.googleapis.com/auth/devstorage.read_only"]
            )
        except DefaultCredentialsError:  # public buckets need none
            token = "anon"
    return GCSFileSystem(
        token=token,
        version_aware=True,
        use_listings_cache=False,
        skip_instance_cache=True,
        requests_timeout=ANSWER_SEC,
    )


def _generation(info: dict[str, Any]) -> Found:
    return Found(int(info["size"]), str(info["generation"]))


class AzureRemote:
    name = "Azure Blob Storage"
    remedy = (
        "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with "
        "AZURE_STORAGE_ACCOUNT_KEY or a login that may read the container"
    )

    def __init__(self) -> None:
        self._fs = _PerProcess(_azure)

    def look(self, uri: str) -> Found | None:
        info = self._fs().info(uri, refresh=True)
        return _tagged(info) if info["type"] == "file" else None

    def find(self, folder: str) -> dict[str, Found]:
        fs = self._fs()
        fs.invalidate_cache()
        scheme = folder.partition("://")[0]
        return {
            f"{scheme}://{info['name']}": _tagged(info)
            for info in fs.find(folder, detail=True).values()
        }

    def read(self, uri: str, found: Found, start: int, size: int) -> bytes:
        from azure.core import MatchConditions
        from azure.core.exceptions import HttpResponseError
        from fsspec.asyn import sync

        fs = self._fs()
        container, _, name = uri.partition("://")[2].partition("/")

        async def fetch() -> bytes:
            async with fs.service_client.get_blob_client(container, name) as blob:
                answer = await blob.download_blob(
                    offset=start,
                    length=size,
                    etag=f'"{found.version}"',
                    match_condition=MatchConditions.IfNotModified,
                )
                return cast(bytes, await answer.readall())

        try:
            return cast(bytes, sync(fs.loop, fetch))
        except HttpResponseError as error:
            if error.status_code in (_NONE_FOUND, _CHANGED):
                raise VersionGoneError from None
            raise


def _azure() -> Any:
    import adlfs

    return adlfs.AzureBlobFileSystem(skip_instance_cache=True, use_listings_cache=False)


def _tagged(info: dict[str, Any]) -> Found:
    return Found(int(info["size"]), str(info["etag"]).strip('"'))
