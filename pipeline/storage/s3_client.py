"""How S3 is spoken to: the client, which of its failures pass, for how long, and their names."""

from __future__ import annotations

from typing import Any

import tenacity

from specbatch.schemas.errors import MissingExtraError
from specbatch.schemas.masking import mask_url

REFUSALS = ("AccessDenied", "NotImplemented", "MethodNotAllowed")
_NO_ANSWER = (
    *("EndpointConnectionError", "ConnectionClosedError", "ProxyConnectionError"),
    *("ConnectTimeoutError", "ReadTimeoutError"),
)
_TRANSIENT_CODES = {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "503"}


class Patience:
    """How long failures of one operation may take in all; what succeeds takes as long as it takes.

    An upload of many parts has one: a store that fails once per part must not be retried for hours.
    """

    def __init__(self, seconds: float):
        self._left = seconds
        self._noted = 0.0  # of the request that is being retried: seconds up to its last failure

    def is_used_up(self, state: tenacity.RetryCallState) -> bool:
        """Whether to give up after a failure rather than wait and try again."""
        return self._since(state) + state.upcoming_sleep >= self._left

    def note(self, state: tenacity.RetryCallState) -> None:
        """Take off what this failure took, and the wait that follows it."""
        since = self._since(state) + state.upcoming_sleep
        self._left -= since
        self._noted += since

    def _since(self, state: tenacity.RetryCallState) -> float:
        if state.attempt_number == 1:
            self._noted = 0.0
        return max(0.0, (state.seconds_since_start or 0.0) - self._noted)


def new_client(endpoint_url: str | None, answer_sec: float) -> Any:
    """A boto3 client. Raises `MissingExtraError` without boto3."""
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
            connect_timeout=min(10.0, answer_sec),
            read_timeout=answer_sec,
            # Stores other than AWS know the classic headers only; we send SHA-256 ourselves.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


def unfinished(client: Any, bucket: str, prefix: str) -> list[dict[str, str]]:
    """Uploads in parts that were begun and not ended, as their requests name them."""
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
        again = status >= 500 and status != 501  # which is that it cannot, now or later
        return again or status == 429 or code(error) in _TRANSIENT_CODES
    passing = (
        exceptions.HTTPClientError
        | exceptions.ConnectionError  # also refused, timed out, or of a name that is not resolved
        | exceptions.IncompleteReadError
    )
    lasting = exceptions.SSLError | exceptions.ProxyConnectionError
    return isinstance(error, passing) and not isinstance(error, lasting)


def code(error: BaseException | None) -> str:
    """The store's own word for what went wrong; empty where it had none."""
    response = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def reason(error: BaseException, endpoint_url: str | None) -> str:
    """What is told of a failure: no more of the address than where the store is."""
    name = code(error) or type(error).__name__
    where = mask_url(endpoint_url) if endpoint_url else "AWS"
    if name in ("NoCredentialsError", "PartialCredentialsError"):
        return "no S3 credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if name in ("AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch"):
        return f"the S3 store at {where} denied access ({name})"
    if name == "SSLError":
        return (
            f"the certificate of the S3 store at {where} is not trusted; AWS_CA_BUNDLE names a "
            "file with those that are"
        )
    if name in _NO_ANSWER:
        return f"the S3 store at {where} cannot be reached ({name})"
    if name in ("NoSuchBucket", "NoSuchKey", "404"):
        return "no such bucket" if name == "NoSuchBucket" else "no such object"
    if name == "NoSuchUpload":
        return "the upload was ended by a later one to the same name, or by a rule of the bucket"
    return f"the S3 store at {where} answered {name}"
