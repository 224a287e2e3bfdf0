"""How long a connection may keep the service waiting. uvicorn itself waits for ever.

A client has `head_sec` for the head of a request, however it divides its bytes, and `stalled_sec`
to take what it asked for. At the limit of connections a new one takes the place of the one that has
waited longest: first of those that have sent no whole head, then of those whose key is not known.
So clients that send slowly, however many they are, do not keep others out.

How long the body of a request may take is said in `uploads.py`.
"""

from __future__ import annotations

from asyncio import BaseTransport, TimerHandle
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from specbatch.jobs.serve.guard import KNOWN

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
        theirs, ours = self.conn.their_state, self.conn.our_state
        is_rest = theirs is h11.SEND_BODY and ours is h11.DONE
        return theirs is h11.IDLE or is_rest or self.transport.is_closing()

    @property
    def owes_a_body(self) -> bool:
        """Whether a request waits for its body, and nobody knows from whom it is."""
        is_known = bool(self.scope and self.scope["state"].get(KNOWN))
        return self.conn.their_state is h11.SEND_BODY and not is_known

    def _watch(self) -> None:
        """Bytes that come do not begin the time anew: only a whole head ends it."""
        if not self.owes_a_head:
            self._forget_owed()
        elif self._owed is None:
            self.since = self.loop.time()
            self._owed = self.loop.call_later(self.head_sec, self.transport.abort)

    def _forget_owed(self) -> None:
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
