"""What jobs cost, one by one or in lines by tenant, proposer, tag or day. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum

from specbatch.pipeline.policy.costs.balance import NOTHING, Amount, Sheet, job_sheet, rows_sheet
from specbatch.pipeline.policy.costs.savings import Span, drafted, pooled, savings
from specbatch.pipeline.policy.costs.stage_costs import StageCost, other_units, stage_costs
from specbatch.schemas.job_figures import Savings
from specbatch.schemas.provenance import TimeKind
from specbatch.schemas.records import NO_TAG, JobRow, Stage
from specbatch.schemas.timekeeping import JobTime, RowTime
from specbatch.schemas.usage import StageUsage

NO_PROPOSER = "(none)"
NO_ROW = "(in no row)"  # lost, pending, hints and all but devices: no row's, so no tag's


class By(StrEnum):
    """What lines are about."""

    TENANT = "tenant"
    JOB = "job"
    PROPOSER = "proposer"
    TAG = "tag"
    DAY = "day"


@dataclass(frozen=True, slots=True)
class JobCost:
    """A job with its time."""

    job: JobRow
    times: Sequence[JobTime]
    rows: Sequence[RowTime]
    usage: Sequence[StageUsage] = ()

    @property
    def total(self) -> Amount:
        """The time of devices, and what all that was used cost."""
        return self.sheet.total + Amount(0, other_units(self.usage))

    @property
    def by_stage(self) -> dict[Stage, StageCost]:
        return stage_costs(self.times, self.usage)

    @property
    def sheet(self) -> Sheet:
        return job_sheet(self.times, self.rows, self.job.state.is_final)

    @property
    def saved(self) -> Savings | None:
        return savings(self.job.report)

    @property
    def drafted(self) -> bool:
        """Anything, for any row."""
        verified = sum(row.accepted + row.ahead_ticks + row.ticks.rejected for row in self.rows)
        return drafted(self.job.report, verified)

    @property
    def span(self) -> Span:
        """When it ran; one that runs may share control steps with any that is to come."""
        begin = self.job.started_at or self.job.created_at
        return begin, math.inf if self.job.finished_at is None else self.job.finished_at


@dataclass(slots=True)
class Line:
    """Figures of some jobs, or of some of their rows."""

    name: str
    jobs: int = 0
    documents: int = 0
    completion_tokens: int = 0
    accepted: int = 0
    cost: Amount = NOTHING  # the time of devices, and all money
    drafting: Amount = NOTHING  # of that, on drafts and on those that were refused
    drafted: bool = False  # for any of the jobs
    measured: list[tuple[Savings, Span]] = field(default_factory=list)

    def count(self, rows: Iterable[RowTime]) -> None:
        for row in rows:
            self.documents += row.documents
            self.completion_tokens += row.completion_tokens
            self.accepted += row.accepted
            self.drafting += rows_sheet([row]).of(TimeKind.DRAFT, TimeKind.REJECTED)

    @property
    def usd_per_1k_tokens(self) -> float | None:
        return _by(1000 * self.cost.usd, self.completion_tokens)

    @property
    def usd_per_document(self) -> float | None:
        return _by(self.cost.usd, self.documents)

    @property
    def usd_per_accepted_token(self) -> float | None:
        """What it cost to have a draft token accepted: all drafting, and all that was refused."""
        return _by(self.drafting.usd, self.accepted)

    @property
    def saved(self) -> Savings | None:
        return pooled(self.measured)


def line_of(costs: Iterable[JobCost], name: str = "") -> Line:
    """All of them together."""
    line = Line(name)
    for cost in costs:
        line.jobs += 1
        line.count(cost.rows)
        line.cost += cost.total
        line.drafted |= cost.drafted
        if cost.saved is not None:
            line.measured.append((cost.saved, cost.span))
    return line


def lines_by(by: By, costs: Sequence[JobCost]) -> list[Line]:
    """The dearest first. They add up to what the jobs cost."""
    lines = _by_tag(costs) if by is By.TAG else _by_job(costs, _NAMES[by])
    return sorted(lines, key=lambda line: (-line.cost.units, line.name))


def _by_job(costs: Sequence[JobCost], name_of: Callable[[JobRow], str]) -> list[Line]:
    found: dict[str, list[JobCost]] = {}
    for cost in costs:
        found.setdefault(name_of(cost.job), []).append(cost)
    return [line_of(of, name) for name, of in found.items()]


def _by_tag(costs: Sequence[JobCost]) -> list[Line]:
    lines: dict[str, Line] = {}
    rest = Line(NO_ROW, jobs=len(costs))
    for cost in costs:
        tags = {row.tag for row in cost.rows}
        for tag in tags:
            line = lines.setdefault(tag or NO_TAG, Line(tag or NO_TAG))
            mine = [row for row in cost.rows if row.tag == tag]
            line.jobs += 1
            line.count(mine)
            line.cost += rows_sheet(mine).total
        rest.cost += cost.total - rows_sheet(cost.rows).total
    return [*lines.values(), *([rest] if rest.cost != NOTHING else [])]


def _day(job: JobRow) -> str:
    """On which it was submitted."""
    return datetime.fromtimestamp(job.created_at, UTC).strftime("%Y-%m-%d")


_NAMES: dict[By, Callable[[JobRow], str]] = {
    By.TENANT: lambda job: job.tenant,
    By.JOB: lambda job: f"{job.job_id} ({job.name})",
    By.PROPOSER: lambda job: job.proposer or NO_PROPOSER,
    By.DAY: _day,
}


def _by(value: float, count: int) -> float | None:
    return value / count if count else None
