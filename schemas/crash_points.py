"""Names the places where a process may die, a disk fill up or a link break.

Code calls `reach` at these places. Nothing listens unless `specbatch chaos` or a test arms a crash
point in its own worker processes. No setting and no environment variable can arm one.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class CrashPoint(StrEnum):
    """A place just before or just after a change that others can see."""

    LEASE = "lease"  # a unit is claimed, nothing is done yet
    ARTEFACT_WRITE = "artefact-write"  # a group's prompts or results are about to be written
    DRAFT_WRITE = "draft-write"  # a group's draft blocks are about to be written
    SUBMIT = "submit"  # a group's requests are with the engine
    VERIFY = "verify"  # the engine has some of a group's tokens, not all
    SQL_COMMIT = "sql-commit"  # a transaction's statements are sent, its COMMIT is not
    COMMITTED = "committed"  # a transaction's COMMIT is answered, no message is sent yet
    ACK = "ack"  # a task is done, its message not acknowledged yet
    UPLOAD = "upload"  # an output part lies on the local disk, not at its place
    MANIFEST = "manifest"  # all parts are in place, the manifest is not


_armed: Callable[[CrashPoint], None] | None = None


def reach(point: CrashPoint) -> None:
    """Report that this place is reached. Does nothing unless armed."""
    if _armed is not None:
        _armed(point)


def arm(what: Callable[[CrashPoint], None] | None) -> None:
    """Call `what` at every crash point of this process; None disarms."""
    global _armed
    _armed = what
