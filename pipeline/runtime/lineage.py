"""Tells OpenLineage of jobs: START once the input is open, then COMPLETE, FAIL or ABORT.

Events wait in the store among the notifications, added in the transactions that they speak of, and
the thread of a `Notifier` sends them. So each arrives at least once, and an endpoint that is slow
or away neither delays a job nor fails it. Where events go is OpenLineage's own configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.notifier import TAKEN_SEC, retry_sec
from specbatch.schemas import lineage
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.errors import ObjectError, StoreError
from specbatch.schemas.notifications import ENDS, Due, Event, NotificationRow
from specbatch.schemas.records import JobRow

if TYPE_CHECKING:  # imported where an event is sent
    from openlineage.client import OpenLineageClient
    from openlineage.client.event_v2 import RunEvent

log = logging.getLogger(__name__)

LAST_SEC = 5.0  # that a process waits at its end for what is still to be sent
_RESUMING = (EntryKind.RETRIED, EntryKind.REVIEWED)


def make_lineage(docs_url: str) -> Lineage | None:
    """What tells OpenLineage; None where it is not configured, or its client is not installed.

    `docs_url`: where the documentation is, which has the schema of our facet.
    """
    if not lineage.is_configured():
        return None
    if not lineage.is_installed():
        log.warning(
            "OpenLineage is configured, and its client is not installed here, so no lineage is "
            "told: `pip install 'specbatch[lineage]'`, or set OPENLINEAGE_DISABLED=true"
        )
        return None
    return Lineage(docs_url)


class Lineage:
    """The target of notifications that is OpenLineage. For one thread."""

    def __init__(self, docs_url: str) -> None:
        self._docs_url = docs_url
        self._client: OpenLineageClient | None = None  # made when it is first needed

    @property
    def events(self) -> Sequence[Event]:
        return (Event.STARTED, *ENDS)

    def tell(self, one: Due, job: JobRow, store: Store) -> None:
        """Emit the event, and before an end its run's start unless that was told.

        Who sends the end takes the start first, so no other process can tell it later. Raises
        `ObjectError` where the endpoint does not take it, without its address, while another
        process tells the start, and where it cannot be made: another version may have noted the
        facts, or the client is another one.
        """
        try:
            self._tell(one, job, store)
        except (ObjectError, StoreError):
            raise
        except Exception as error:
            raise ObjectError(f"the event cannot be made here: {_why(error)}") from error

    def _tell(self, one: Due, job: JobRow, store: Store) -> None:
        from specbatch.pipeline.runtime.lineage_events import Events

        told = [row for row in store.notifications_of(job.job_id) if row.target == lineage.TARGET]
        ends = [row for row in told if row.event in ENDS]
        starts = [row for row in told if row.event is Event.STARTED]
        events = Events(job, store.progress(job.job_id), self._docs_url)
        if one.event is Event.STARTED:
            if all(row.sent_at is None for row in ends):  # else the end's sender told it
                self._emit(events.start(0, job.started_at or one.at))
            return
        before = [row for row in ends if row.number < one.number]
        if before:  # the job was resumed after an end: that is another run
            self._emit(events.start(len(before), _resumed_at(store, one, before[-1])))
        elif all(row.sent_at is None for row in starts):
            start = events.start(0, job.started_at or one.at)
            waiting = [row for row in starts if row.due_at is not None]  # else it was given up
            if waiting:
                self._emit_taken(_due(job.job_id, waiting[0]), start, store)
            else:
                self._emit(start)
        self._emit(events.end(len(before), one.event, one.at))

    def _emit_taken(self, one: Due, event: RunEvent, store: Store) -> None:
        """Emit the event of another notification than that which this process sends."""
        if not store.take_notification(one, TAKEN_SEC):
            raise ObjectError("another process tells its start now, and its end is told after it")
        try:
            self._emit(event)
        except ObjectError as error:
            store.note_not_sent(one, str(error), retry_sec(one.attempts + 1))
            raise
        store.note_sent(one)

    def close(self) -> None:
        """Let a transport with a queue of its own send what is in it."""
        close = getattr(self._client, "close", None)
        if close is not None:
            close(LAST_SEC)

    def _emit(self, event: RunEvent) -> None:
        try:
            if self._client is None:
                from openlineage.client import OpenLineageClient

                self._client = OpenLineageClient()
            self._client.emit(event)
        except Exception as error:  # of any transport; a job must not depend on what it raises
            raise ObjectError(f"OpenLineage does not take the event: {_why(error)}") from None


def _due(job_id: str, row: NotificationRow) -> Due:
    return Due(job_id, row.number, row.target, row.event, row.at, row.attempts)


def _resumed_at(store: Store, one: Due, before: NotificationRow) -> float:
    """When the job was retried or reviewed after its end before; at the latest its present end."""
    for entry in store.log(one.job_id, before.number, batch=8):
        if entry.number >= one.number:
            break
        if entry.kind in _RESUMING:
            return entry.at
    return one.at


def _why(error: Exception) -> str:
    """Without the error's own words, which may hold the address."""
    answer = getattr(error, "response", None)
    status = getattr(answer, "status_code", None)
    return type(error).__name__ if status is None else f"HTTP status {status}"
