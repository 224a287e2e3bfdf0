"""S3 and stores that speak its protocol, through boto3.

The server checks every upload (SHA-256), and a HEAD checks it once more. A failed upload is
aborted, so it leaves no truncated object. The next upload to the same key, or the deletion of a
job's files, aborts what a killed process left. Each process makes its client at first use, never
before a fork. Credentials come from boto3's usual places and are never printed.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from specbatch.pipeline.storage.object_store import ObjectInfo, changed, verified
from specbatch.pipeline.storage.ranged import ranged
from specbatch.pipeline.storage.retrying import Patience, retrying
from specbatch.schemas import usage
from specbatch.schemas.errors import MissingExtraError, ObjectError
from specbatch.schemas.masking import mask_url
from specbatch.schemas.records import Artefact

T = TypeVar("T")

PART_BYTES = 16 << 20  # of a multipart upload; also the largest single-request upload


class S3Objects:
    """Objects in buckets. `retry_sec` limits the total time of failures of one operation, however
    many requests it makes; `answer_sec` is the timeout of one answer."""

    def __init__(
        self,
        endpoint_url: str | None = None,
        retry_sec: float = 120.0,
        answer_sec: float = 60.0,
    ):
        self._endpoint_url = endpoint_url
        self._retry_sec = retry_sec
        self._answer_sec = answer_sec
        self._lock = threading.Lock()
        self._made_client: Any = None
        self._made_in_pid = -1

    def put_bytes(self, uri: str, data: bytes) -> Artefact:
        if len(data) > PART_BYTES:
            return self._put_parts(uri, io.BytesIO(data))
        return self._put_whole(uri, data)

    def put_file(self, uri: str, local_path: Path, staging: str | None = None) -> Artefact:
        del staging  # an object appears only when it is complete
        if local_path.stat().st_size <= PART_BYTES:
            return self._put_whole(uri, local_path.read_bytes())
        with local_path.open("rb") as file:
            return self._put_parts(uri, file)

    def put_new(self, uri: str, data: bytes) -> bool:
        bucket, key = split(uri)
        try:
            answer = self._call(
                "write", uri, lambda s3: s3.put_object(
                    Bucket=bucket, Key=key, Body=data, IfNoneMatch="*", **_checks(data)
                ),
            )  # fmt: skip
        except ObjectError as error:
            if code(error.__cause__) in ("PreconditionFailed", "ConditionalRequestConflict"):
                return False
            if code(error.__cause__) != "NotImplemented":
                raise
            if self.head(uri) is not None:  # best effort for a store without conditional writes
                return False
            self._put_whole(uri, data)
        else:
            self._confirm(Artefact(uri, hashlib.sha256(data).hexdigest(), len(data)), answer)
        return True

    def get_bytes(self, uri: str, expect: Artefact | None = None) -> bytes:
        bucket, key = split(uri)
        data = self._call("read", uri, lambda s3: _body(s3.get_object(Bucket=bucket, Key=key)))
        return verified(uri, data, expect)

    def open(self, uri: str, version: str | None = None) -> BinaryIO:
        info = self.head(uri)
        if info is None:
            raise ObjectError(f"cannot read {uri}: no such object")
        if version is not None and info.version != version:
            raise changed(uri)
        return ranged(info.size, lambda start, size: self.read_range(info, start, size))

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

    def is_whole(self, artefact: Artefact) -> bool:
        """The store checked the bytes against the SHA-256 when it took them."""
        return _is(artefact, self._head(artefact.uri) or {})

    def move(self, artefact: Artefact, to: str) -> None:
        source = dict(zip(("Bucket", "Key"), split(artefact.uri), strict=True))
        bucket, key = split(to)
        patience = Patience(self._retry_sec)
        self._call(
            "write", to,
            lambda s3: s3.copy_object(Bucket=bucket, Key=key, CopySource=source),
            patience,
        )  # fmt: skip
        self._confirm(Artefact(to, artefact.sha256, artefact.size_bytes), {}, patience)

    def clear(self, folder: str) -> None:
        root = f"{folder.rstrip('/')}/"
        self.abort_uploads(root)
        for info in self.list(root):
            self.delete(info.uri)

    def abort_uploads(self, prefix: str) -> None:
        try:
            for upload in self._unfinished(prefix):
                self._end(f"s3://{upload['Bucket']}/{upload['Key']}", upload)
        except ObjectError as error:
            if code(error.__cause__) not in REFUSALS:  # a bucket's own rule may expire them
                raise

    def read_range(self, info: ObjectInfo, start: int, size: int) -> bytes:
        """Bytes [start, start + size) of exactly this version of an object."""
        bucket, key = split(info.uri)

        def fetch(s3: Any) -> bytes:
            answer = s3.get_object(
                Bucket=bucket, Key=key, IfMatch=info.version,
                Range=f"bytes={start}-{start + size - 1}",
            )  # fmt: skip
            return _body(answer)

        try:
            data = self._call("read", info.uri, fetch)
        except ObjectError as error:
            if code(error.__cause__) in ("PreconditionFailed", "412", "NoSuchKey"):
                raise changed(info.uri) from error
            raise
        if len(data) != min(size, info.size - start):
            raise ObjectError(
                f"cannot read {info.uri}: the S3 store sent {len(data)} bytes where {size} were "
                "asked for; a proxy on the way may cut answers short"
            )
        return data

    # --- uploads ----------------------------------------------------------------------------
    def _put_whole(self, uri: str, data: bytes) -> Artefact:
        bucket, key = split(uri)
        patience = Patience(self._retry_sec)
        answer = self._call(
            "write", uri,
            lambda s3: s3.put_object(Bucket=bucket, Key=key, Body=data, **_checks(data)),
            patience,
        )  # fmt: skip
        artefact = Artefact(uri, hashlib.sha256(data).hexdigest(), len(data))
        return self._confirm(artefact, answer, patience)

    def _put_parts(self, uri: str, file: BinaryIO) -> Artefact:
        bucket, key = split(uri)
        artefact = _measure(uri, file)
        target = {"Bucket": bucket, "Key": key}
        patience = Patience(self._retry_sec)
        begin = self._call(
            "write", uri,
            lambda s3: s3.create_multipart_upload(
                **target, Metadata={"sha256": artefact.sha256}, ChecksumAlgorithm="SHA256"
            ),
            patience,
        )  # fmt: skip
        mine = {**target, "UploadId": begin["UploadId"]}
        try:
            parts: list[dict[str, Any]] = []
            while data := file.read(PART_BYTES):
                parts.append(self._put_part(uri, mine, len(parts) + 1, data, patience))
            answer = self._complete(uri, mine, parts, patience)
        except BaseException:
            self._abort(uri, mine)
            raise
        self._confirm(artefact, answer, patience)
        self._abort_leftovers(uri, key)  # not earlier: uploads may be a successor's
        return artefact

    def _put_part(
        self, uri: str, target: dict[str, str], number: int, data: bytes, patience: Patience
    ) -> dict[str, Any]:
        checksum = _base64_sha256(data)
        answer = self._call(
            "write", uri,
            lambda s3: s3.upload_part(
                **target, PartNumber=number, Body=data, ChecksumSHA256=checksum
            ),
            patience,
        )  # fmt: skip
        return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumSHA256": checksum}

    def _complete(
        self, uri: str, target: dict[str, str], parts: Sequence[Any], patience: Patience
    ) -> Any:
        """The store's answer; empty if the upload no longer exists. Then either an answer was lost
        or another process aborted the upload, and only the object can show which."""
        try:
            return self._call(
                "write", uri,
                lambda s3: s3.complete_multipart_upload(**target, MultipartUpload={"Parts": parts}),
                patience,
            )  # fmt: skip
        except ObjectError as error:
            if code(error.__cause__) != "NoSuchUpload":
                raise
            return {}

    def _abort(self, uri: str, target: dict[str, str]) -> None:
        with contextlib.suppress(ObjectError):  # the error that led here says more
            self._end(uri, target)

    def _end(self, uri: str, target: dict[str, str]) -> None:
        try:
            self._call("abort the upload of", uri, lambda s3: s3.abort_multipart_upload(**target))
        except ObjectError as error:
            if code(error.__cause__) != "NoSuchUpload":  # it has ended meanwhile
                raise

    def _abort_leftovers(self, uri: str, key: str) -> None:
        """Abort abandoned uploads to this key. Parts of a killed process cost money for ever, and
        so would an upload that was started twice because an answer was lost.

        A key has one writer at a time, and a writer that lost its lease must not finish either.
        """
        try:
            found = self._unfinished(uri)
        except ObjectError:
            return  # forbidden or not supported: a bucket's own rule may expire them
        for upload in found:
            if upload["Key"] == key:
                self._abort(uri, upload)

    def _unfinished(self, prefix: str) -> Sequence[dict[str, str]]:
        bucket, key = split(prefix)
        return self._call("look for uploads of", prefix, lambda s3: unfinished(s3, bucket, key))

    def _confirm(
        self, artefact: Artefact, answer: dict[str, Any], patience: Patience | None = None
    ) -> Artefact:
        """Raise unless the store now has these bytes. A wrong object is deleted only if `answer`
        names it, because a frozen process may later find what its successor uploaded."""
        uri = artefact.uri
        found = self._head(uri, patience) or {}
        if _is(artefact, found):
            return artefact
        if not found or found["ETag"] != answer.get("ETag"):
            raise ObjectError(
                f"the upload to {uri} is gone: it was deleted or replaced by another upload, "
                "which was left alone; try again"
            )
        with contextlib.suppress(ObjectError):  # no row names it, so no process reads it
            self._delete_only(uri, found["ETag"])
        raise ObjectError(
            f"{uri} did not arrive whole (size or SHA-256 differ after the upload); "
            "it was deleted, try again"
        )

    def _delete_only(self, uri: str, etag: str) -> None:
        """Delete an object unless another has taken its place."""
        bucket, key = split(uri)
        try:
            self._call(
                "delete", uri,
                lambda s3: s3.delete_object(Bucket=bucket, Key=key, IfMatch=etag),
            )  # fmt: skip
        except ObjectError as error:
            if code(error.__cause__) != "NotImplemented":
                raise
            self.delete(uri)  # best effort for a store without conditional deletion

    # --- requests ---------------------------------------------------------------------------
    def _head(self, uri: str, patience: Patience | None = None) -> dict[str, Any] | None:
        bucket, key = split(uri)
        try:
            return cast(
                dict[str, Any],
                self._call(
                    "look at", uri, lambda s3: s3.head_object(Bucket=bucket, Key=key), patience
                ),
            )
        except ObjectError as error:
            if code(error.__cause__) in ("404", "NoSuchKey", "NotFound"):
                return None
            raise

    def _call(
        self,
        verb: str,
        uri: str,
        request: Callable[[Any], T],
        patience: Patience | None = None,
    ) -> T:
        client = self._client()
        from botocore.exceptions import BotoCoreError, ClientError

        patience = patience or Patience(self._retry_sec)
        try:
            return retrying(is_transient, patience)(request, client)
        except (BotoCoreError, ClientError) as error:
            message = f"cannot {verb} {uri}: {reason(error, self._endpoint_url)}"
            raise ObjectError(message, passing=is_transient(error)) from error

    def _client(self) -> Any:
        with self._lock:
            if self._made_client is None or self._made_in_pid != os.getpid():
                self._made_client = new_client(self._endpoint_url, self._answer_sec)
                self._made_in_pid = os.getpid()
            return self._made_client


def _body(answer: Any) -> bytes:
    data = cast(bytes, answer["Body"].read())
    usage.count(received_bytes=len(data))
    return data


def split(uri: str) -> tuple[str, str]:
    """Bucket and key of an S3 uri; raises `ObjectError` if there is no bucket."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if not bucket or "@" in bucket or ":" in bucket:
        raise ObjectError(
            "an S3 uri looks like s3://bucket/key; credentials belong in the environment"
        )
    return bucket, key


def _is(artefact: Artefact, head: dict[str, Any]) -> bool:
    """Whether the answer to a HEAD is that of this file."""
    if head.get("ContentLength") != artefact.size_bytes:
        return False
    return bool(head["Metadata"].get("sha256") == artefact.sha256)


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


REFUSALS = ("AccessDenied", "NotImplemented", "MethodNotAllowed")
_NO_ANSWER = (
    *("EndpointConnectionError", "ConnectionClosedError", "ProxyConnectionError"),
    *("ConnectTimeoutError", "ReadTimeoutError"),
)
_TRANSIENT_CODES = {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "503"}


def new_client(endpoint_url: str | None, answer_sec: float) -> Any:
    """A boto3 client. Raises `MissingExtraError` without boto3."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise MissingExtraError("s3:// needs boto3: pip install 'specbatch[s3]'") from None
    session = boto3.Session()  # the default session is not thread-safe
    client = session.client(
        "s3",
        endpoint_url=endpoint_url,
        region_name=session.region_name or "us-east-1",
        config=Config(
            retries={"mode": "standard", "max_attempts": 2},  # we retry more, with a time limit
            connect_timeout=min(10.0, answer_sec),
            read_timeout=answer_sec,
            # Stores other than AWS know the classic headers only; we send SHA-256 ourselves.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    client.meta.events.register("before-send.s3", _count_request)
    return client


_READS = ("GET", "HEAD")
_LISTING = re.compile(r"[?&](list-type=|uploads(&|=|$))")


def _count_request(request: Any, **_: object) -> None:
    """Count a request that is about to be sent, a repeated one too. What lists is priced like what
    writes; nobody charges for deleting."""
    if request.method == "DELETE":
        return
    is_listing = request.method == "GET" and _LISTING.search(request.url) is not None
    reads = request.method in _READS and not is_listing
    sent = int(request.headers.get("Content-Length", 0) or 0)
    usage.count(object_reads=int(reads), object_writes=int(not reads), sent_bytes=sent)


def unfinished(client: Any, bucket: str, prefix: str) -> list[dict[str, str]]:
    """Unfinished multipart uploads, as the keyword arguments of later requests."""
    pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
    return [
        {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
        for page in pages
        for upload in page.get("Uploads", [])
    ]


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed a moment later."""
    from botocore import exceptions

    if isinstance(error, exceptions.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        again = status >= 500 and status != 501  # 501 is permanent
        return again or status == 429 or code(error) in _TRANSIENT_CODES
    passing = (
        exceptions.HTTPClientError
        | exceptions.ConnectionError  # also refused, timed out, or of a name that is not resolved
        | exceptions.IncompleteReadError
    )
    lasting = exceptions.SSLError | exceptions.ProxyConnectionError
    return isinstance(error, passing) and not isinstance(error, lasting)


def code(error: BaseException | None) -> str:
    """The store's error code; empty if it sent none."""
    response = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def reason(error: BaseException, endpoint_url: str | None) -> str:
    """The reason of a failure, without more of the address than the store's host."""
    name = code(error) or type(error).__name__
    where = mask_url(endpoint_url) if endpoint_url else "AWS"
    if name in ("NoCredentialsError", "PartialCredentialsError"):
        return "no S3 credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if name in ("AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch"):
        return f"the S3 store at {where} denied access ({name})"
    if name == "SSLError":
        return (
            f"the certificate of the S3 store at {where} is not trusted; set AWS_CA_BUNDLE to a "
            "file with its authority"
        )
    if name in _NO_ANSWER:
        return f"the S3 store at {where} cannot be reached ({name})"
    if name in ("NoSuchBucket", "NoSuchKey", "404"):
        return "no such bucket" if name == "NoSuchBucket" else "no such object"
    if name == "NoSuchUpload":
        return "a later upload to the same name, or a rule of the bucket, ended this upload"
    return f"the S3 store at {where} answered {name}"
