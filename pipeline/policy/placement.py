"""Which jobs a worker leaves to cheaper pools. Pure: no SQL, no clock, no torch.

A pool is a set of alike workers with one price. A worker leaves a job alone as long as cheaper
pools finish it in time:

- A job with a deadline is left while the cheaper pools' devices get through its work, and through
  what goes before it, before the deadline, with `MARGIN`. So a worker of a dearer pool begins when
  the time left no longer suffices, and not before.
- A job without one is left until the cheaper pools have not continued it for `patience_sec`.
- Spot devices may be taken away. They count only where what is left could be done twice before the
  deadline: once there, and once more by devices that stay. Else spot workers leave the job, too.

Only live workers count. When a pool dies, other pools take its jobs, so no work is left undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Of the time that is left to do: what estimates of it are off by, twice what the shown end adds
# (`observe/terminal/eta.py`), because a worker that joins too late cannot make up for it.
MARGIN = 1.2


class Pool(NamedTuple):
    """Alike workers with one price."""

    name: str
    price_microusd: int  # of an hour of one device, in millionths of a dollar
    is_spot: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """A live job's groups that are still to be verified."""

    job_id: str
    tenant: str
    priority: int  # 0 goes first
    created_at: float  # seconds since the epoch
    deadline_at: float | None
    rows: int
    is_read: bool  # whether these are all that there will be
    sec_per_row: float | None  # device seconds; None: nothing is known yet
    group_rows: int  # of its largest group: one device works on a group
    moved_at: float  # when it last got on
    devices: Mapping[Pool, int]  # live ones that may verify it

    @property
    def left_sec(self) -> float | None:
        """Device seconds of all that is left; None: not known."""
        if self.sec_per_row is None or not self.is_read:
            return None
        return self.rows * self.sec_per_row

    @property
    def group_sec(self) -> float:
        return self.group_rows * (self.sec_per_row or 0.0)


class Choice(NamedTuple):
    """Whether a worker may claim a job's groups, and why."""

    takes: bool
    why: str


def choose(
    now: float,
    here: Pool,
    works: Sequence[Work],
    patience_sec: float,
    weights: Mapping[str, float] | None = None,
) -> dict[str, Choice]:
    """What a worker of this pool does about each job. `weights`: the tenants' shares."""
    return {
        work.job_id: _choice(now, here, work, works, patience_sec, weights or {}) for work in works
    }


def _choice(
    now: float,
    here: Pool,
    work: Work,
    works: Sequence[Work],
    patience_sec: float,
    weights: Mapping[str, float],
) -> Choice:
    steady = {pool for pool in work.devices if not pool.is_spot}
    spot = work.devices.keys() - steady
    may_be_lost = not spot or _fits_twice(now, work, works, spot, steady, weights)
    if here.is_spot and steady and not may_be_lost:
        return Choice(False, "too close to its deadline for a device that may be taken away")
    usable = work.devices.keys() if may_be_lost else steady
    cheaper = {pool for pool in usable if pool.price_microusd < here.price_microusd}
    if not cheaper:
        return Choice(True, "no cheaper pool may do it")
    names = ", ".join(sorted({pool.name for pool in cheaper}))
    if now - work.moved_at >= patience_sec:
        return Choice(True, f"cheaper pools ({names}) have not continued it for {patience_sec:g} s")
    if work.deadline_at is None:
        return Choice(False, f"cheaper pools ({names}) do it")
    needed = _needed_sec(work, works, cheaper, weights)
    if needed is None:
        return Choice(True, "nobody knows yet how long it takes")
    if now + MARGIN * needed > work.deadline_at:
        return Choice(True, f"cheaper pools ({names}) would not finish it in time")
    return Choice(False, f"cheaper pools ({names}) finish it in time")


def _fits_twice(
    now: float,
    work: Work,
    works: Sequence[Work],
    spot: Iterable[Pool],
    steady: Iterable[Pool],
    weights: Mapping[str, float],
) -> bool:
    """Whether it can be done on spot devices, and again by those that stay, before its deadline."""
    if work.deadline_at is None:
        return True
    once = _needed_sec(work, works, set(spot), weights)
    again = _needed_sec(work, works, set(steady) or set(spot), weights)
    if once is None or again is None:
        return False
    return now + MARGIN * (once + again) <= work.deadline_at


def _needed_sec(
    work: Work, works: Sequence[Work], pools: set[Pool], weights: Mapping[str, float]
) -> float | None:
    """How long these pools take to the end of a job; None: nobody knows.

    The last group runs on one device, however many there are.
    """
    left = work.left_sec
    if left is None:
        return None
    devices = sum(work.devices[pool] for pool in pools)
    return (left + _ahead_sec(work, left, works, pools, weights)) / devices + work.group_sec


def _ahead_sec(
    work: Work, left: float, works: Sequence[Work], pools: set[Pool], weights: Mapping[str, float]
) -> float:
    """Device seconds of other jobs that come before its end, in the order of `ledger/fair_share`.

    Jobs of a higher priority come first. Of the same one come the tenant's older jobs, and of each
    other tenant what its share lets through meanwhile.
    """
    first = 0.0
    beside: dict[str, float] = {}
    for other in works:
        if other.job_id == work.job_id or not pools & other.devices.keys():
            continue
        sec = other.rows * (other.sec_per_row or work.sec_per_row or 0.0)
        if other.priority < work.priority:
            first += sec
        elif other.priority == work.priority and other.tenant != work.tenant:
            beside[other.tenant] = beside.get(other.tenant, 0.0) + sec
        elif other.priority == work.priority and _is_older(other, work):
            first += sec
    mine = weights.get(work.tenant, 1.0)
    share = {name: left * weights.get(name, 1.0) / mine for name in beside}
    return first + sum(min(sec, share[name]) for name, sec in beside.items())


def _is_older(one: Work, other: Work) -> bool:
    return (one.created_at, one.job_id) < (other.created_at, other.job_id)
