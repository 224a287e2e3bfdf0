"""S3 and stores that speak its protocol, through boto3.

Every upload is checked by the server (SHA-256) and once more with a HEAD; an upload that fails
half way is aborted, so no truncated object is left. The client is made on first use in each
process, never before a fork. Credentials come from boto3's usual places and are never printed.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import tenacity

from specbatch.pipeline.ingest.objects import ObjectInfo, changed, verified
from specbatch.schemas.errors import MissingExtraError, ObjectError
from specbatch.schemas.records import Artefact
from specbatch.schemas.settings import mask_url

T = TypeVar("T")

PART_BYTES = 16 << 20  # of a multipart upload; also the largest single-request upload
READ_AHEAD_BYTES = 4 << 20
_TRANSIENT_CODES = {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "503"}


class S3Objects:
    """Objects in buckets. `retry_sec` caps the total time spent on retries of one operation."""

    def __init__(self, endpoint_url: str | None = None, retry_sec: float = 120.0):
        self._endpoint_url = endpoint_url
        self._retry_sec = retry_sec
        self._lock = threading.Lock()
        self._made_client: Any = None
        self._made_in_pid = -1

    def put_bytes(self, uri: str, data: bytes) -> Artefact:
        if len(data) > PART_BYTES:
            return self._put_parts(uri, io.BytesIO(data))
        return self._put_whole(uri, data)

    def put_file(self, uri: str, local_path: Path) -> Artefact:
        if local_path.stat().st_size <= PART_BYTES:
            return self._put_whole(uri, local_path.read_bytes())
        with local_path.open("rb") as file:
            return self._put_parts(uri, file)

    def put_new(self, uri: str, data: bytes) -> bool:
        bucket, key = split(uri)
        try:
            self._call(
                "write", uri, lambda s3: s3.put_object(
                    Bucket=bucket, Key=key, Body=data, IfNoneMatch="*", **_checks(data)
                ),
            )  # fmt: skip
        except ObjectError as error:
            if _code(error.__cause__) in ("PreconditionFailed", "ConditionalRequestConflict"):
                return False
            if _code(error.__cause__) != "NotImplemented":
                raise
            if self.head(uri) is not None:  # a store without conditional writes: best effort
                return False
            self._put_whole(uri, data)
        return True

    def get_bytes(self, uri: str, expect: Artefact | None = None) -> bytes:
        bucket, key = split(uri)
        data = self._call(
            "read", uri, lambda s3: s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        )
        return verified(uri, data, expect)

    def open(self, uri: str, version: str | None = None) -> BinaryIO:
        info = self.head(uri)
        if info is None:
            raise ObjectError(f"cannot read {uri}: no such object")
        if version is not None and info.version != version:
            raise changed(uri)
        return cast(BinaryIO, io.BufferedReader(_S3File(self, info), READ_AHEAD_BYTES))

    def list(self, prefix: str) -> list[ObjectInfo]:
        bucket, key = split(prefix)

        def pages(s3: Any) -> list[ObjectInfo]:
            return [
                ObjectInfo(f"s3://{bucket}/{item['Key']}", item["Size"], item["ETag"].strip('"'))
                for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key)
                for item in page.get("Contents", [])
                if not item["Key"].endswith("/")
            ]

        return sorted(self._call("list", prefix, pages), key=lambda info: info.uri)

    def head(self, uri: str) -> ObjectInfo | None:
        found = self._head(uri)
        if found is None:
            return None
        return ObjectInfo(uri, found["ContentLength"], found["ETag"].strip('"'))

    def delete(self, uri: str) -> None:
        bucket, key = split(uri)
        self._call("delete", uri, lambda s3: s3.delete_object(Bucket=bucket, Key=key))

    def read_range(self, info: ObjectInfo, start: int, size: int) -> bytes:
        """Bytes [start, start + size) of exactly this version of an object."""
        bucket, key = split(info.uri)

        def fetch(s3: Any) -> bytes:
            answer = s3.get_object(
                Bucket=bucket, Key=key, IfMatch=info.version,
                Range=f"bytes={start}-{start + size - 1}",
            )  # fmt: skip
            return cast(bytes, answer["Body"].read())

        try:
            return self._call("read", info.uri, fetch)
        except ObjectError as error:
            if _code(error.__cause__) in ("PreconditionFailed", "412", "NoSuchKey"):
                raise changed(info.uri) from error
            raise

    # --- uploads ----------------------------------------------------------------------------
    def _put_whole(self, uri: str, data: bytes) -> Artefact:
        bucket, key = split(uri)
        self._call(
            "write", uri,
            lambda s3: s3.put_object(Bucket=bucket, Key=key, Body=data, **_checks(data)),
        )  # fmt: skip
        return self._confirm(Artefact(uri, hashlib.sha256(data).hexdigest(), len(data)))

    def _put_parts(self, uri: str, file: BinaryIO) -> Artefact:
        bucket, key = split(uri)
        artefact = _measure(uri, file)
        target = {"Bucket": bucket, "Key": key}
        begin = self._call(
            "write", uri,
            lambda s3: s3.create_multipart_upload(
                **target, Metadata={"sha256": artefact.sha256}, ChecksumAlgorithm="SHA256"
            ),
        )  # fmt: skip
        target["UploadId"] = begin["UploadId"]
        try:
            parts: list[dict[str, Any]] = []
            while data := file.read(PART_BYTES):
                parts.append(self._put_part(uri, target, len(parts) + 1, data))
            self._call(
                "write", uri,
                lambda s3: s3.complete_multipart_upload(**target, MultipartUpload={"Parts": parts}),
            )  # fmt: skip
        except BaseException:
            self._abort(uri, target)
            raise
        return self._confirm(artefact)

    def _put_part(
        self, uri: str, target: dict[str, str], number: int, data: bytes
    ) -> dict[str, Any]:
        checksum = _base64_sha256(data)
        answer = self._call(
            "write", uri,
            lambda s3: s3.upload_part(
                **target, PartNumber=number, Body=data, ChecksumSHA256=checksum
            ),
        )  # fmt: skip
        return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumSHA256": checksum}

    def _abort(self, uri: str, target: dict[str, str]) -> None:
        try:
            self._call("abort the upload of", uri, lambda s3: s3.abort_multipart_upload(**target))
        except ObjectError:
            return  # the error that led here says more

    def _confirm(self, artefact: Artefact) -> Artefact:
        """Raise unless the store now holds these bytes; a wrong object is deleted."""
        found = self._head(artefact.uri)
        if (
            found is None
            or found["ContentLength"] != artefact.size_bytes
            or found["Metadata"].get("sha256") != artefact.sha256
        ):
            self.delete(artefact.uri)
            raise ObjectError(
                f"{artefact.uri} did not arrive whole (size or SHA-256 differ after the upload); "
                "it was deleted, try again"
            )
        return artefact

    # --- requests ---------------------------------------------------------------------------
    def _head(self, uri: str) -> dict[str, Any] | None:
        bucket, key = split(uri)
        try:
            return cast(
                dict[str, Any],
                self._call("look at", uri, lambda s3: s3.head_object(Bucket=bucket, Key=key)),
            )
        except ObjectError as error:
            if _code(error.__cause__) in ("404", "NoSuchKey", "NotFound"):
                return None
            raise

    def _call(self, verb: str, uri: str, request: Callable[[Any], T]) -> T:
        client = self._client()
        from botocore.exceptions import BotoCoreError, ClientError

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_transient),
            stop=tenacity.stop_before_delay(self._retry_sec),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=10.0),
            reraise=True,
        )
        try:
            return retrying(request, client)
        except (BotoCoreError, ClientError) as error:
            raise ObjectError(f"cannot {verb} {uri}: {self._reason(error)}") from error

    def _reason(self, error: Exception) -> str:
        name = _code(error) or type(error).__name__
        where = mask_url(self._endpoint_url) if self._endpoint_url else "AWS"
        if name in ("NoCredentialsError", "PartialCredentialsError"):
            return "no S3 credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        if name in ("AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch"):
            return f"the S3 store at {where} denied access ({name})"
        if name in ("NoSuchBucket", "NoSuchKey", "404"):
            return "no such bucket" if name == "NoSuchBucket" else "no such object"
        return f"the S3 store at {where} answered {name}"

    def _client(self) -> Any:
        with self._lock:
            if self._made_client is None or self._made_in_pid != os.getpid():
                self._made_client = _new_client(self._endpoint_url)
                self._made_in_pid = os.getpid()
            return self._made_client


class _S3File(io.RawIOBase):
    """Random access to one version of an object by ranged reads."""

    def __init__(self, objects: S3Objects, info: ObjectInfo):
        self._objects = objects
        self._info = info
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._info.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._info.size - self._at)
        if size <= 0:
            return 0
        data = self._objects.read_range(self._info, self._at, size)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def split(uri: str) -> tuple[str, str]:
    """Bucket and key of an S3 uri; raises `ObjectError` when there is no bucket."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if not bucket or "@" in bucket or ":" in bucket:
        raise ObjectError(
            "an S3 uri looks like s3://bucket/key; credentials belong in the environment"
        )
    return bucket, key


def _new_client(endpoint_url: str | None) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise MissingExtraError("s3:// needs boto3: pip install 'specbatch[s3]'") from None
    session = boto3.Session()  # the default session is not thread-safe
    return session.client(
        "s3",
        endpoint_url=endpoint_url,
        region_name=session.region_name or "us-east-1",
        config=Config(
            retries={"mode": "standard", "max_attempts": 2},  # the rest is ours, with a time cap
            connect_timeout=10,
            read_timeout=60,
            # Stores other than AWS know the classic headers only; we send SHA-256 ourselves.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


def _is_transient(error: BaseException) -> bool:
    from botocore import exceptions

    if isinstance(error, exceptions.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or status == 429 or _code(error) in _TRANSIENT_CODES
    return isinstance(
        error, exceptions.HTTPClientError | exceptions.IncompleteReadError
    ) and not isinstance(error, exceptions.SSLError | exceptions.ProxyConnectionError)


def _code(error: BaseException | None) -> str:
    response = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _checks(data: bytes) -> dict[str, Any]:
    return {
        "ChecksumSHA256": _base64_sha256(data),
        "Metadata": {"sha256": hashlib.sha256(data).hexdigest()},
    }


def _base64_sha256(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def _measure(uri: str, file: BinaryIO) -> Artefact:
    digest, size = hashlib.sha256(), 0
    while chunk := file.read(PART_BYTES):
        digest.update(chunk)
        size += len(chunk)
    file.seek(0)
    return Artefact(uri, digest.hexdigest(), size)
