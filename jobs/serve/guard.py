"""Wraps the whole application. It refuses requests that two readers could read in two ways, and
gives every answer, those to errors too, the headers that say what a browser may do with it.
uvicorn's own answers, as to what is no request, do not pass here: they are plain text.

A proxy that checks one of two `Authorization` headers, or takes a body's length from
`Content-Length` where this service takes it from `Transfer-Encoding`, would let others in.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specbatch.jobs.serve.errors import ApiError

ONCE = (
    *(b"authorization", b"content-encoding", b"content-length", b"content-type", b"cookie"),
    *(b"host", b"idempotency-key", b"origin", b"transfer-encoding"),
)
KNOWN = "caller_is_known"  # in a request's state: its key counts
HEADERS = {  # of answers that set none; pages have a policy of their own
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """The ASGI application around another one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refused = why_not(scope["headers"])
        if refused is None:
            await self.app(scope, receive, with_headers)
            return
        # What follows on this connection may be the rest of a body.
        answer = JSONResponse(refused.body, refused.status, {"Connection": "close"})
        await answer(scope, receive, with_headers)


def why_not(headers: list[tuple[bytes, bytes]]) -> ApiError | None:
    """Why a request with these headers is refused; None: it is not."""
    names = [name.lower() for name, _ in headers]
    for name in ONCE:
        if names.count(name) > 1:
            said = f"the request has more than one `{name.decode()}` header: send one"
            return ApiError(400, said)
    if {b"content-length", b"transfer-encoding"} <= set(names):
        return ApiError(
            400, "the request has both content-length and transfer-encoding: send one of them"
        )
    encoding = dict(headers).get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"identity", b""):
        return ApiError(415, "the body must not be compressed: send it without content-encoding")
    return None
