"""What a store must tell whoever measures. Part of the contract in `contract.py`."""

from __future__ import annotations

from typing import Protocol

from specbatch.schemas.figures import StoreFigures

AUDITED_SEC = 30 * 86_400.0  # audits count for so long
MISSED_SEC = 7 * 86_400.0  # and so do times that a schedule missed
SUCCESS_SEC = 35 * 86_400.0  # and its last success: longer than any month and who notices it


class FiguresStore(Protocol):
    """The whole store in a few numbers, cheap enough to be asked for every few seconds."""

    def figures(self) -> StoreFigures:
        """Its backlog, and beside it audits and schedules, lately.

        A schedule has a figure from when it is looked after, so that its first loss is a rise.
        One that was paused has no last success, and no figure if it lost nothing lately.
        """
        ...
