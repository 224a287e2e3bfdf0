"""Errors of the service in OpenAI's shape, with the status that clients of it expect."""

from __future__ import annotations

import logging
import re
from typing import Any

from specbatch.schemas.errors import (
    IdempotencyError,
    InUseError,
    SpecbatchError,
    StoreError,
    UsageError,
)
from specbatch.schemas.serving import NoSuchFileError, TooManyOpenError

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

_PLACE = re.compile(r"(?<![\w.:/])(\w+:/)?/[^\s`'\",;:]+")


class ApiError(SpecbatchError):
    """A request is refused; the message is one sentence for its sender."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after  # in seconds

    @property
    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`, as OpenAI has it."""
        kind = _TYPES.get(self.status) or (
            "server_error" if self.status >= 500 else "invalid_request_error"
        )
        said = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": said}


def wrong(param: str, message: str) -> ApiError:
    """The request is wrong in the field `param`."""
    return ApiError(400, message, None, param)


def logged(error: SpecbatchError) -> ApiError:
    """The answer to a client after an internal error. The log has the error itself."""
    told = _as_api_error(error)
    log.log(logging.INFO if told.status < 500 else logging.WARNING, "a request failed: %s", error)
    return told


def _as_api_error(error: SpecbatchError) -> ApiError:
    """What a client is told of an error of ours. What only the operator can fix is not
    told."""
    if isinstance(error, ApiError):
        return error
    said = str(error)
    if isinstance(error, IdempotencyError):
        return ApiError(409, said, "idempotency_key_in_use")
    if isinstance(error, InUseError):
        return ApiError(409, said, "file_in_use")
    if isinstance(error, TooManyOpenError):
        return ApiError(429, said, "too_many_batches")
    if isinstance(error, NoSuchFileError):
        return ApiError(404, said, "file_not_found", "input_file_id")
    if isinstance(error, StoreError):
        return ApiError(503, "the service cannot reach its store: try again later", "unavailable")
    status = 400 if isinstance(error, UsageError) else 500
    return ApiError(status, "the request failed: ask the operator, whose log says why")


def without_places(text: str) -> str:
    """A sentence of ours without the operator's folders and addresses."""
    return _PLACE.sub("…", text)


def failure(code: str, message: str) -> dict[str, Any]:
    """An entry of a batch's `errors` that concerns no line."""
    return {"code": code, "message": message, "line": None, "param": None}


def unknown(what: str, given: str) -> ApiError:
    """There is none, or it is another tenant's: a client cannot tell these apart."""
    return ApiError(404, f"there is no {what} {given[:100]!r}", f"{what}_not_found")
