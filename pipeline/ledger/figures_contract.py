"""What a store must tell whoever measures. Part of the contract in `contract.py`."""

from __future__ import annotations

from typing import Protocol

from specbatch.schemas.figures import StoreFigures

AUDITED_SEC = 30 * 86_400.0  # audits count for so long
MISSED_SEC = 7 * 86_400.0  # and so do times that a schedule missed


class FiguresStore(Protocol):
    """The whole store in a few numbers, cheap enough to be asked for every few seconds."""

    def figures(self) -> StoreFigures:
        """Now, by the store's clock. Jobs that are over cost nothing, however many there are.

        A group counts as ready while nobody holds it, or when its lease ran out; then it has waited
        since. The same is true of jobs that are due to be read or published; one whose input waits
        for groups to be done is none. Groups of a job with the cancel flag count until they are
        closed. A schedule has a figure when a run of it was ever submitted, or lost lately.
        """
        ...
