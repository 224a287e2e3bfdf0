"""A store that counts what a worker does with it.

The stages do not know that they are measured. Only what the store accepted is counted: a refused
commit is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.observe.metrics.meter import Meter
from specbatch.pipeline.runtime.client import Enqueue
from specbatch.schemas.records import (
    Beat,
    CompletionRecord,
    DueWork,
    GroupWork,
    JobRow,
    JobWork,
    Lease,
    NewGroup,
    RejectedRow,
    Released,
    Stage,
)

if TYPE_CHECKING:  # the light install has no numpy
    from specbatch.pipeline.engines.contract import Engines


def kv_blocks(host: Engines) -> list[tuple[int, int, int]]:
    """Held, free and cached blocks of each engine."""
    return [stats.kv_blocks for stats in host.stats]


def metered(store: Store, meter: Meter) -> Store:
    """The same store; `meter` counts what it accepts."""
    return cast(Store, MeteredStore(store, meter))  # everything else is the store's


def counted(enqueue: Enqueue, on_enqueued: Callable[[Stage], None]) -> Enqueue:
    """The same, and `on_enqueued` is called after each message."""

    def enqueue_and_count(work: DueWork) -> None:
        enqueue(work)
        on_enqueued(work.stage)

    return enqueue_and_count


class MeteredStore:
    """Passes every call on to the store, through a function of `_COUNTED` where there is one."""

    def __init__(self, store: Store, meter: Meter) -> None:
        self._store = store
        self._meter = meter

    def __getattr__(self, name: str) -> Any:
        method, counted_by = getattr(self._store, name), _COUNTED.get(name)
        return method if counted_by is None else partial(counted_by, self._meter, method)

    def __repr__(self) -> str:
        return repr(self._store)


# Each gets the meter, the store's method, and what that is called with.
def _known(meter: Meter, get: Callable[..., JobRow], job_id: str) -> JobRow:
    job = get(job_id)
    meter.knows(job)
    return job


def _claimed(meter: Meter, claim: Callable[..., Any], *args: Any) -> JobWork | GroupWork | None:
    work: JobWork | GroupWork | None = claim(*args)
    if work is not None:
        meter.claimed(work.lease, work.waited_sec if isinstance(work, GroupWork) else None)
    return work


def _beaten(meter: Meter, beat: Callable[..., Beat], *args: Any) -> Beat:
    found = beat(*args)
    meter.missed(found.lost)
    return found


def _released(
    meter: Meter,
    release: Callable[..., Released],
    lease: Lease,
    error: str,
    forgiven: bool = False,
    whole: bool = False,
) -> Released:
    with meter.asking(lease, ends=True):
        released = release(lease, error, forgiven, whole)
        meter.given_back(lease, is_failure=released.was_held and not forgiven)
    return released


def _ended(meter: Meter, end: Callable[..., None], lease: Lease, *args: Any) -> None:
    """The attempt is over, and is not retried."""
    with meter.asking(lease, ends=True):
        end(lease, *args)


def _done(meter: Meter, step: Callable[..., Any], lease: Lease, *args: Any, **kwargs: Any) -> Any:
    with meter.asking(lease):
        found = step(lease, *args, **kwargs)
        meter.done(lease)
    return found


def _recorded(
    meter: Meter,
    keep: Callable[..., Any],
    lease: Lease,
    completions: Sequence[CompletionRecord],
    *args: Any,
    **kwargs: Any,
) -> Any:
    with meter.asking(lease):
        found = keep(lease, completions, *args, **kwargs)
        meter.recorded(lease.job_id, completions)
        meter.done(lease)
    return found


def _planned(
    meter: Meter,
    add: Callable[..., None],
    lease: Lease,
    groups: Sequence[NewGroup],
    rejected: Sequence[RejectedRow],
    *args: Any,
    **kwargs: Any,
) -> None:
    with meter.asking(lease):
        add(lease, groups, rejected, *args, **kwargs)
    meter.quarantined(row.code for row in rejected)


def _paused(meter: Meter, pause: Callable[..., int], lease: Lease, *args: Any) -> int:
    with meter.asking(lease):
        room = pause(lease, *args)
        if not room:
            meter.done(lease)
    return room


def _swept(
    meter: Meter, due: Callable[..., list[DueWork]], limit: int = 256, job_id: str | None = None
) -> list[DueWork]:
    found = due(limit, job_id)
    if job_id is None:
        meter.swept()
    return found


_COUNTED: Mapping[str, Callable[..., Any]] = {
    "get_job": _known,
    **dict.fromkeys(("claim_job", "claim_group", "claim_next"), _claimed),
    "heartbeat": _beaten,
    "release": _released,
    **dict.fromkeys(("fail_job", "cancel_group"), _ended),
    **dict.fromkeys(("finish_ingest", "advance", "finish_job"), _done),
    **dict.fromkeys(("commit_group", "keep_part"), _recorded),
    "add_groups": _planned,
    "pause_ingest": _paused,
    "due": _swept,
}
