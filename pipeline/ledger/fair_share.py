"""Which tenant's job is next. Pure: no SQL, no clock.

Tenants share by start-time fair queueing: each has a virtual time, `served`, in tokens divided by
its weight, and the least is next. A claim starts at `started` and advances its tenant's time by its
cost. A tenant that comes back after idling starts where the others are, so nobody saves up turns;
and a tenant that waits while others are served falls behind nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DEFAULT_WEIGHT = 1.0
MAX_TOKENS = 128  # of a stored spec without it


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
    tokens_per_row: int  # the most that a row's completions can have
    is_budgeted: bool = False  # its tenant has a budget


def by_turn(waiting: Iterable[Waiting]) -> list[Waiting]:
    """The jobs that are due, in fair-share order.

    Higher priorities go first; within one, the tenant that was served least; of a tenant, the
    oldest job.
    """
    due = [job for job in waiting if job.is_due]
    return sorted(due, key=lambda job: (job.priority, job.served, job.created_at, job.job_id))


def floor_of(job: Waiting, waiting: Sequence[Waiting]) -> float:
    """The earliest start of a claim of this job: the latest start of the other tenants.

    Only tenants with work of its priority count. A tenant that was always there is never behind
    this: it would have been served. (The least start might be that of another newcomer: two that
    come together would be served alone until they caught up with the others.)
    """
    others = (o.started for o in waiting if o.tenant != job.tenant and o.priority == job.priority)
    return max(others, default=0.0)


def cost_of(rows: int, prompt_tokens: int, tokens_per_row: int, weight: float) -> float:
    """A claim's cost in virtual time: its most tokens, divided by the weight."""
    return (prompt_tokens + rows * tokens_per_row) / weight


def tokens_per_row(max_tokens: int | None, samples: int | None) -> int:
    """By the job's spec; rows with values of their own count alike."""
    return (max_tokens or MAX_TOKENS) * (samples or 1)
