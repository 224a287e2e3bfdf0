"""Which tenant's job is next. Pure: no SQL, no clock.

Tenants share device time by start-time fair queueing. Each has a virtual time, `served`: device
seconds divided by its weight, and the least is next. A claim starts at `started` and advances its
tenant's time by an estimate; when the group's attempt ends, what it really took replaces this. An
attempt that is lost with its worker stays charged by its estimate.

A tenant that comes back after idling starts where the others are, so nobody saves up turns. One
that always had work may be behind them only by what estimates were too high: its `credit`.

Within a tenant the higher priority goes first, then the earlier deadline, then the older job. A job
with a deadline is urgent in the second half of its time. It goes ahead of other tenants while its
own one is ahead of its share by less than `LEAD_SEC`, and pays this back as any other claim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest

DEFAULT_WEIGHT = 1.0
SEC_PER_TOKEN = 1e-3  # until the first group of a tenant has ended
LEAD_SEC = 60.0  # device seconds


@dataclass(frozen=True, slots=True)
class Waiting:
    """A live job with open groups at a stage, and its tenant's virtual time."""

    job_id: str
    tenant: str
    priority: int  # 0 goes first
    created_at: float  # seconds since the epoch
    is_due: bool  # one of its groups can be claimed now; else all are held
    served: float  # its tenant's virtual time
    started: float  # where on it the tenant's last claim began
    credit: float  # by how much it may be behind the others though it was never idle
    sec_per_token: float  # device seconds of its tenant's groups; 0: none has ended
    weight: float  # its tenant's
    deadline_at: float | None  # seconds since the epoch
    is_urgent: bool  # less than half of the time to its deadline is left
    is_budgeted: bool  # its tenant has a budget
    under_way_sec: float = (
        0.0  # device seconds in `served` that are estimates, of the job asked for
    )


@dataclass(frozen=True, slots=True)
class Turn:
    """A job that is due, and the values by which a claim of it is charged."""

    job: Waiting
    floor: float  # the earliest start of a claim, but for the tenant's credit
    reached: float  # the virtual time of all: the least start of any claim now
    sec_per_token: float  # the estimate


def by_turn(waiting: Sequence[Waiting]) -> list[Turn]:
    """The jobs that are due, in fair-share order."""
    due = [job for job in waiting if job.is_due]
    if not due:
        return []
    floors = _floors(waiting)
    starts = {job.tenant: max(job.served, floors[job.tenant] - job.credit) for job in due}
    reached = min(starts.values())

    def place(job: Waiting) -> tuple[float | str, ...]:
        deadline, start = _deadline(job), starts[job.tenant]
        if job.is_urgent and (start - reached) * job.weight < LEAD_SEC:
            return (0, deadline, start, job.priority, job.created_at, job.job_id)
        return (1, start, job.priority, deadline, job.created_at, job.job_id)

    rates = _rates(waiting)
    return [
        Turn(job, floors[job.tenant], reached, rates[job.tenant]) for job in sorted(due, key=place)
    ]


def _deadline(job: Waiting) -> float:
    return math.inf if job.deadline_at is None else job.deadline_at


def _floors(waiting: Iterable[Waiting]) -> dict[str, float]:
    """By tenant the latest start of the others, of which each was the least served one by then.

    A tenant that was always there is behind this by its credit at most: it would have been served.
    (The least start might be that of another newcomer: two that come together would be served alone
    until they caught up with the others.)
    """
    starts = {job.tenant: min(job.started, job.served) for job in waiting}
    latest = [*nlargest(2, starts, key=starts.__getitem__), None]
    others = {name: latest[1] if name == latest[0] else latest[0] for name in starts}
    return {name: 0.0 if other is None else starts[other] for name, other in others.items()}


def _rates(waiting: Iterable[Waiting]) -> Mapping[str, float]:
    """Device seconds per token by tenant: its own, else the others' mean, else a guess."""
    own = {job.tenant: job.sec_per_token for job in waiting}
    known = [rate for rate in own.values() if rate > 0]
    guess = sum(known) / len(known) if known else SEC_PER_TOKEN
    return {name: rate or guess for name, rate in own.items()}
