"""What becomes of sessions. Pure: no SQL, no clock."""

from __future__ import annotations

from specbatch.schemas.errors import SessionEndedError


def ended(session_id: str) -> SessionEndedError:
    """The error of a word about a session that is over, or never was."""
    return SessionEndedError(f"session {session_id} has ended: its worker was not heard of")


def at_end(seen: int, accounted: int) -> tuple[int, int]:
    """(leased, lost) ticks of a session that ends, so that leased = accounted + lost."""
    leased = max(seen, accounted)
    return leased, leased - accounted
