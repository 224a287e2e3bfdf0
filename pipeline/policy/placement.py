"""Which jobs a worker leaves to other pools, by price. Pure: no SQL, no clock, no torch.

A pool is a set of alike workers with one price. A worker leaves a job alone as long as cheaper
pools finish it in time:

- A job with a deadline is left while the cheaper pools' devices get through its work, and through
  what goes before it, before the deadline, with `MARGIN`. So a worker of a dearer pool begins when
  the time left no longer suffices, and not before. While nobody knows how long it takes, everybody
  takes it.
- A job without one is left until the cheaper pools have not continued it for `patience_sec`.
- Spot devices may be taken away. They count only where what is left could be done twice before the
  deadline: once there, and once more by devices that stay. Else spot workers leave the job, too, if
  those that stay finish it in time without them.

Workers of one pool leave each other nothing, and nobody leaves a job to a pool for a price that
nobody knows. Only live workers count. When a pool dies, other pools take its jobs, so no work is
left undone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Of the time that is left to do: what estimates of it are off by, twice what the shown end adds
# (`observe/terminal/eta.py`), because a worker that joins too late cannot make up for it.
MARGIN = 1.2

_TOO_CLOSE = "too close to its deadline"


class Pool(NamedTuple):
    """Alike workers with one price."""

    name: str
    price_microusd: int | None  # of an hour of one device; None: nobody knows
    is_spot: bool = False

    def is_cheaper_than(self, other: Pool) -> bool:
        """Whether it is another pool with a lower price."""
        if self.name == other.name or self.price_microusd is None or other.price_microusd is None:
            return False
        return self.price_microusd < other.price_microusd

    def may_get_from(self, other: Pool) -> bool:
        """Whether the other may leave a job to it: for its price, or because it stays."""
        stays = other.is_spot and not self.is_spot and self.name != other.name
        return stays or self.is_cheaper_than(other)


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
    moved_at: float  # its last progress
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
    cheaper = {pool for pool in work.devices if pool.is_cheaper_than(here)}
    others, kind, why = cheaper, "cheaper pools", ""
    if _may_be_lost(now, work, works, weights):
        stay = {pool for pool in work.devices if not pool.is_spot and pool.may_get_from(here)}
        others = stay if here.is_spot else cheaper & stay
        if cheaper and not others:
            return Choice(True, f"{_TOO_CLOSE} for devices that may be taken away")
        if here.is_spot:
            kind, why = "pools that stay", f"{_TOO_CLOSE} for a device that may be taken away: "
    if not others:
        return Choice(True, "no cheaper pool may do it")
    named = f"{kind} ({', '.join(sorted({pool.name for pool in others}))})"
    if now - work.moved_at >= patience_sec:
        return Choice(True, f"{named} have not continued it for {patience_sec:g} s")
    if work.deadline_at is None:
        return Choice(False, f"{named} do it")
    needed = _needed_sec(work, works, others, weights)
    if needed is None:
        return Choice(True, "nobody knows yet how long it takes")
    if now + MARGIN * needed > work.deadline_at:
        return Choice(True, f"{named} would not finish it in time")
    return Choice(False, f"{why}{named} finish it in time")


def _may_be_lost(
    now: float, work: Work, works: Sequence[Work], weights: Mapping[str, float]
) -> bool:
    """Whether it is too late to do it on spot devices, and again by those that stay.

    Where nobody knows how long that takes, it is not: all the devices there are may be needed.
    """
    spot = {pool for pool in work.devices if pool.is_spot}
    if work.deadline_at is None or not spot:
        return False
    once = _needed_sec(work, works, spot, weights)
    again = _needed_sec(work, works, work.devices.keys() - spot or spot, weights)
    if once is None or again is None:
        return False
    return now + MARGIN * (once + again) > work.deadline_at


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

    Of its own tenant that are the jobs that go first, and of each other tenant what its share lets
    through meanwhile. The short lead of urgent jobs (`LEAD_SEC`) is within `MARGIN`.
    """
    first = 0.0
    beside: dict[str, float] = {}
    for other in works:
        if other.job_id == work.job_id or not pools & other.devices.keys():
            continue
        sec = other.rows * (other.sec_per_row or work.sec_per_row or 0.0)
        if other.tenant != work.tenant:
            beside[other.tenant] = beside.get(other.tenant, 0.0) + sec
        elif _turn(other) < _turn(work):
            first += sec
    of_weight = (first + left) / weights.get(work.tenant, 1.0)
    shares = {name: of_weight * weights.get(name, 1.0) for name in beside}
    return first + sum(min(sec, shares[name]) for name, sec in beside.items())


def _turn(work: Work) -> tuple[int, float, float, str]:
    """Where a job is in its tenant's order."""
    deadline = math.inf if work.deadline_at is None else work.deadline_at
    return (work.priority, deadline, work.created_at, work.job_id)
