"""What each stage of jobs cost: devices, and all else that its attempts used. Pure arithmetic.

Everything is in whole units and adds up: the stages' costs are what their metered quantities cost
at the prices of the workers that used them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from specbatch.pipeline.policy.costs.balance import NOTHING, Amount, at
from specbatch.schemas.records import CLAIMABLE, Stage
from specbatch.schemas.timekeeping import JobTime, usd_of
from specbatch.schemas.usage import (
    NOTHING_USED,
    PARTS,
    Quantities,
    StageUsage,
    cost_by_part,
)

DEVICE = "device"


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage of some jobs."""

    device: Amount = NOTHING
    used: Quantities = NOTHING_USED
    parts: Mapping[str, int] = field(default_factory=dict)  # of `PARTS`, in units
    lost: int = 0  # of the total: attempts whose results were not kept
    pending: int = 0  # of the total: attempts in flight

    def __add__(self, other: StageCost) -> StageCost:
        parts = {part: self.of(part) + other.of(part) for part in PARTS}
        return StageCost(
            self.device + other.device,
            self.used + other.used,
            parts,
            self.lost + other.lost,
            self.pending + other.pending,
        )

    def of(self, part: str) -> int:
        """What a part cost, the device too, in units."""
        return self.device.units if part == DEVICE else self.parts.get(part, 0)

    @property
    def total(self) -> int:
        """In units."""
        return self.device.units + sum(self.parts.values())


def stage_costs(times: Iterable[JobTime], usage: Iterable[StageUsage]) -> dict[Stage, StageCost]:
    """By stage, in the order of the stages. Hints were written for rows that others had: they are
    neither kept nor lost."""
    found = {stage: StageCost() for stage in CLAIMABLE}
    for time in times:
        amount = at(time.ticks.total, time.price_microusd)
        lost, pending = _fate(amount.units, time.kept or time.hints, time.in_flight)
        found[time.stage] += StageCost(amount, lost=lost, pending=pending)
    for one in usage:
        parts = cost_by_part(one.used, one.prices)
        lost, pending = _fate(sum(parts.values()), one.kept, one.in_flight)
        found[one.stage] += StageCost(NOTHING, one.used, parts, lost, pending)
    return found


def added(costs: Iterable[Mapping[Stage, StageCost]]) -> dict[Stage, StageCost]:
    """The same of several jobs together."""
    total = {stage: StageCost() for stage in CLAIMABLE}
    for cost in costs:
        total = {stage: total[stage] + cost[stage] for stage in CLAIMABLE}
    return total


def total_usd(costs: Mapping[Stage, StageCost]) -> float:
    """All stages together, in dollars."""
    return usd_of(sum(cost.total for cost in costs.values()))


def other_units(usage: Iterable[StageUsage]) -> int:
    """What was used beside devices, in units."""
    return sum(sum(cost_by_part(one.used, one.prices).values()) for one in usage)


def _fate(units: int, kept: bool, in_flight: bool) -> tuple[int, int]:
    """(lost, pending) of these units."""
    if kept:
        return 0, 0
    return (0, units) if in_flight else (units, 0)
