"""Whose turn it is, and what a job's limits say. Pure: no SQL, no clock.

Between tenants it is start-time fair queueing: each has a virtual time, `served`, in tokens by
weight, and the least of them is next. A claim begins at `start` and moves the tenant's time on by
what it costs. Who comes back after idling begins where the others are, so that nobody can save up
turns; and who waits while others are served falls behind nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

DEFAULT_WEIGHT = 1.0
MAX_TOKENS = 128  # of a stored spec that does not say
_BUDGET = "its budget of $"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A live job with open groups at a stage, and where its tenant stands."""

    job_id: str
    tenant: str
    priority: int  # 0 goes first
    created_at: float  # seconds since the epoch
    is_due: bool  # a group of it can be claimed now; else all are held
    served: float  # its tenant's virtual time
    started: float  # where on it the tenant's last claim began
    tokens_per_row: int  # the most that a row's completions can have
    numeric_class: str | None = None  # that it has pinned


def by_turn(waiting: Iterable[Waiting]) -> list[Waiting]:
    """Those that are due, in the order of their turns.

    Higher classes go first; within one, the tenant that was served least; of a tenant, the oldest
    job.
    """
    due = [job for job in waiting if job.is_due]
    return sorted(due, key=lambda job: (job.priority, job.served, job.created_at, job.job_id))


def floor_of(job: Waiting, waiting: Sequence[Waiting]) -> float:
    """Where, at the earliest, a claim of this job begins: the latest start of the other tenants.

    Only those count that have work in its class. A tenant that was always there is never behind
    this: it would have been served. (The least start would be that of another newcomer: two that
    come together would be served alone until they had as much as those who were always there.)
    """
    others = (o.started for o in waiting if o.tenant != job.tenant and o.priority == job.priority)
    return max(others, default=0.0)


def cost_of(rows: int, prompt_tokens: int, tokens_per_row: int, weight: float) -> float:
    """What a claim moves its tenant's virtual time by: tokens at most, by weight."""
    return (prompt_tokens + rows * tokens_per_row) / weight


def tokens_per_row(max_tokens: int | None, samples: int | None) -> int:
    """By the job's spec; rows with values of their own are reckoned alike."""
    return (max_tokens or MAX_TOKENS) * (samples or 1)


def reason_to_stop(
    is_late: bool, deadline_at: float | None, spent_usd: float, budget_usd: float | None
) -> str | None:
    """In words, why a job must stop; None: it need not."""
    if is_late and deadline_at is not None:
        when = datetime.fromtimestamp(deadline_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"its deadline of {when} passed"
    if budget_usd is not None and spent_usd >= budget_usd:
        return f"{_BUDGET}{budget_usd:g} was spent"
    return None


def budget_was_spent(stop_reason: str | None) -> bool:
    """Whether this is why a job was stopped."""
    return stop_reason is not None and stop_reason.startswith(_BUDGET)
