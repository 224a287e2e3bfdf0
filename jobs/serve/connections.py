"""How long a connection may keep the service waiting. uvicorn itself waits for ever.

A client has `head_sec` for the head of a request, however it divides its bytes, and `stalled_sec`
to take what it asked for. At the limit of connections a new one takes the place of the one that has
waited longest: first of those that have sent no whole head, then of those whose key is not known.
So clients that send slowly, however many they are, do not keep others out.

How long the body of a request may take is said in `uploads.py`. The rest of a body that was refused
may take as long: a client that is cut off while it sends may never read the answer.
"""

from __future__ import annotations

from asyncio import BaseTransport, TimerHandle
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from specbatch.jobs.serve.guard import KNOWN
from specbatch.jobs.serve.uploads import LEAST_BYTES_PER_SEC

HEAD_SEC = 15.0
STALLED_SEC = 60.0
MOST_CONNECTIONS = 512
GRACE_SEC = 10  # for requests under way when the service ends


class Guarded(H11Protocol):
    """A connection that is closed when its client takes too long."""

    head_sec = HEAD_SEC
    stalled_sec = STALLED_SEC

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.since = self.loop.time()  # the client's turn began
        self._owed: TimerHandle | None = None
        self._rest_bytes: int | None = None  # that came of a refused body; None: it is no such
        self._stalled: TimerHandle | None = None

    # --- called by asyncio and uvicorn ------------------------------------------------------
    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # of a socket, it is one
        self._watch()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_owed()
        self._forget_stalled()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._rest_bytes is not None:
            self._rest_bytes += len(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.stalled_sec, self.transport.abort)

    def resume_writing(self) -> None:
        self._forget_stalled()
        super().resume_writing()

    # --- whose turn it is -------------------------------------------------------------------
    @property
    def owes_a_head(self) -> bool:
        """Whether nothing is under way but what the client has to send: a head, or the rest of a
        body that was answered already. Or it does not take the last bytes of an answer."""
        is_idle = self.conn.their_state is h11.IDLE
        return is_idle or self.owes_a_rest or self.transport.is_closing()

    @property
    def owes_a_rest(self) -> bool:
        """Whether what comes is the rest of a body that was answered already."""
        return self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE

    @property
    def owes_a_body(self) -> bool:
        """Whether a request waits for its body, and nobody knows from whom it is."""
        is_known = bool(self.scope and self.scope["state"].get(KNOWN))
        return self.conn.their_state is h11.SEND_BODY and not is_known

    def _watch(self) -> None:
        """New bytes do not restart the clock: only a whole head, or rest, stops it."""
        is_rest = self.owes_a_rest
        if not self.owes_a_head or is_rest is (self._rest_bytes is None):
            self._forget_owed()
        if self.owes_a_head and self._owed is None:
            self.since = self.loop.time()
            self._rest_bytes = 0 if is_rest else None
            self._owed = self.loop.call_later(self._may_take_sec(), self._time_is_up)

    def _may_take_sec(self) -> float:
        if self._rest_bytes is None:
            return self.head_sec
        return self.stalled_sec + self._rest_bytes / LEAST_BYTES_PER_SEC

    def _time_is_up(self) -> None:
        """End the connection, unless the bytes that came of a rest have earned it more time."""
        left_sec = self.since + self._may_take_sec() - self.loop.time()
        if self._rest_bytes and left_sec > 0:
            self._owed = self.loop.call_later(left_sec, self._time_is_up)
        else:
            self.transport.abort()

    def _forget_owed(self) -> None:
        self._rest_bytes = None
        if self._owed is not None:
            self._owed.cancel()
            self._owed = None

    def _forget_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _make_room(self) -> None:
        """Close one where uvicorn would refuse the next request of any."""
        if self.limit_concurrency is None or len(self.connections) < self.limit_concurrency:
            return
        others = [one for one in self.connections if isinstance(one, Guarded) and one is not self]
        slow = [one for one in others if one.owes_a_head or one.owes_a_body]
        if slow:
            oldest = min(slow, key=lambda one: (not one.owes_a_head, one.since))
            self.connections.discard(oldest)
            oldest.transport.abort()


def server_config(
    app: Any, host: str = "127.0.0.1", port: int = 0, connection: type[Guarded] = Guarded
) -> uvicorn.Config:
    """How the service listens."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        http=connection,  # of h11, which limits how long a head may be
        ws="none",
        lifespan="off",
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=GRACE_SEC,
    )
