"""A day of three pools whose prices change, with virtual time: what placement by price is tried on.

The trace is made from a seed. Workers claim a group each when they are free, in the order that the
store has (`fair_share`), of the jobs that their rule lets them take. A spot device that is taken
away loses its group, which starts again elsewhere, and comes back later.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from specbatch.pipeline.ledger.fair_share import Waiting, by_turn
from specbatch.pipeline.policy.placement import Choice, Pool, Work, choose
from specbatch.schemas.placement import PlacementSpec, Site

HOUR = 3600.0
PATIENCE_SEC = 4 * HOUR
GROUP_ROWS = 64
WAIT_SEC = 120.0  # until a worker that found nothing looks again
SILENCE_SEC = 180.0  # until a device that was taken away counts as dead

Rule = Callable[[float, Pool, Sequence[Work]], Mapping[str, Choice]]


class Kind(NamedTuple):
    """A pool as it is set up; its price changes by the hour."""

    name: str
    region: str
    is_spot: bool
    devices: int
    usd: float

    @property
    def site(self) -> Site:
        return Site(self.region, self.is_spot)


KINDS = (
    Kind("on-demand", "eu", False, 4, 4.0),
    Kind("mid", "us", False, 3, 2.2),
    Kind("spot", "eu", True, 4, 0.9),
)


@dataclass(slots=True)
class Job:
    job_id: str
    tenant: str
    created_at: float
    deadline_at: float | None
    priority: int
    placement: PlacementSpec
    groups: int  # that are free
    sec_per_row: float
    held: int = 0
    done: int = 0
    moved_at: float = 0.0
    ended_at: float | None = None

    @property
    def group_sec(self) -> float:
        return GROUP_ROWS * self.sec_per_row


@dataclass
class Trace:
    """What happens, whatever the workers do."""

    prices: Mapping[str, Sequence[float]]  # dollars per hour, by pool and hour
    losses: Sequence[tuple[float, int, float]]  # when, which spot device, and until when
    jobs: Sequence[Job]

    @classmethod
    def of_seed(cls, seed: int) -> Trace:
        draw = random.Random(seed)
        prices = {k.name: [k.usd * draw.uniform(0.7, 1.3) for _ in range(72)] for k in KINDS}
        spot = next(kind for kind in KINDS if kind.is_spot)
        losses = []
        for device in range(spot.devices):
            at = draw.expovariate(1 / (3 * HOUR))
            while at < 24 * HOUR:
                gone = draw.uniform(0.2, 1.5) * HOUR
                losses.append((at, device, at + gone))
                at += gone + draw.expovariate(1 / (3 * HOUR))
        jobs = [cls._job(draw, number) for number in range(12)]
        return cls(prices, sorted(losses), jobs)

    @staticmethod
    def _job(draw: random.Random, number: int) -> Job:
        created_at = draw.uniform(0, 18) * HOUR
        groups, sec_per_row = draw.randint(6, 40), draw.uniform(2.0, 9.0)
        alone = groups * GROUP_ROWS * sec_per_row
        # From what all devices need together to what one of them does.
        patience = draw.uniform(0.15, 1.2) * alone + 0.5 * HOUR
        has_deadline = draw.random() < 0.6
        regions = draw.choice([(), (), ("eu",), ("us",)])
        return Job(
            job_id=f"job-{number:02}",
            tenant=draw.choice(["a", "b"]),
            created_at=created_at,
            deadline_at=created_at + patience if has_deadline else None,
            placement=PlacementSpec(regions=regions, spot=draw.random() < 0.8),
            priority=number % 3,
            groups=groups,
            sec_per_row=sec_per_row,
            moved_at=created_at,
        )


@dataclass
class Result:
    usd: float = 0.0
    late: set[str] = field(default_factory=set)
    misplaced: int = 0
    by_pool: Counter[str] = field(default_factory=Counter)  # groups that were finished
    lost_groups: int = 0
    ended_at: float = 0.0


def anything(_now: float, _here: Pool, works: Sequence[Work]) -> Mapping[str, Choice]:
    """Any worker takes anything that it may."""
    return {work.job_id: Choice(True, "") for work in works}


def by_price(now: float, here: Pool, works: Sequence[Work]) -> Mapping[str, Choice]:
    return choose(now, here, works, PATIENCE_SEC)


def simulate(trace: Trace, rule: Rule, kinds: Sequence[Kind] = KINDS) -> Result:
    """Run a trace to its end. What is counted is the time of devices that work."""
    market = Market(trace, rule, kinds)
    market.run()
    return market.result


class Market:
    def __init__(self, trace: Trace, rule: Rule, kinds: Sequence[Kind]) -> None:
        self.trace, self.rule, self.kinds = trace, rule, kinds
        self.jobs = {job.job_id: replace(job) for job in trace.jobs}
        # By tenant its virtual time, in device seconds, and where its last claim began.
        self.served: defaultdict[str, float] = defaultdict(float)
        self.started: defaultdict[str, float] = defaultdict(float)
        self.result = Result()
        self.events: list[tuple[float, int, str, tuple[int, int], object]] = []
        self.number = 0
        self.claim_of: dict[tuple[int, int], int] = {}  # by device: the newest thing it does
        self.gone_since: dict[tuple[int, int], float] = {}

    def push(self, at: float, what: str, device: tuple[int, int], about: object = None) -> int:
        self.number += 1
        heapq.heappush(self.events, (at, self.number, what, device, about))
        return self.number

    def run(self) -> None:
        for k, kind in enumerate(self.kinds):
            for d in range(kind.devices):
                self.claim_of[k, d] = self.push(0.0, "free", (k, d))
            if kind.is_spot:
                for at, d, until in self.trace.losses:
                    self.push(at, "lost", (k, d), until)
        while self.events and any(job.ended_at is None for job in self.jobs.values()):
            now, number, what, device, about = heapq.heappop(self.events)
            if what == "lost":
                self.lose(now, device, float(about))  # type: ignore[arg-type]  # a time, always
            elif self.claim_of[device] == number:
                self.gone_since.pop(device, None)
                if what == "done":
                    self.finish(now, device, *about)  # type: ignore[misc]  # a job and a time
                self.claim(now, device)

    # --- what a device does -------------------------------------------------------------------
    def claim(self, now: float, device: tuple[int, int]) -> None:
        kind = self.kinds[device[0]]
        works = self.works(now)
        choices = self.rule(now, self.pool(kind, now), works)
        mine = [
            job
            for job in self.jobs.values()
            if job.groups and job.created_at <= now and job.placement.allows(kind.site)
            if choices[job.job_id].takes
        ]
        if not mine:
            self.claim_of[device] = self.push(now + WAIT_SEC, "free", device)
            return
        job = self.next_of(now, mine)
        job.groups, job.held = job.groups - 1, job.held + 1
        self.claim_of[device] = self.push(now + job.group_sec, "done", device, (job.job_id, now))

    def next_of(self, now: float, mine: Sequence[Job]) -> Job:
        """In the store's order; its tenant is charged with what the group will take."""
        open_jobs = [job for job in self.jobs.values() if job.groups and job.created_at <= now]
        ids = {job.job_id for job in mine}
        turn = by_turn([self.waiting(now, job, job.job_id in ids) for job in open_jobs])[0]
        job = self.jobs[turn.job.job_id]
        begun = self.started[job.tenant] = max(self.served[job.tenant], turn.floor)
        self.served[job.tenant] = begun + job.group_sec
        return job

    def waiting(self, now: float, job: Job, is_due: bool) -> Waiting:
        half = None if job.deadline_at is None else (job.created_at + job.deadline_at) / 2
        return Waiting(
            job_id=job.job_id,
            tenant=job.tenant,
            priority=job.priority,
            created_at=job.created_at,
            is_due=is_due,
            served=self.served[job.tenant],
            started=self.started[job.tenant],
            credit=0.0,
            sec_per_token=0.0,
            weight=1.0,
            deadline_at=job.deadline_at,
            is_urgent=half is not None and now > half,
            is_budgeted=False,
        )

    def finish(self, now: float, device: tuple[int, int], job_id: str, begun: float) -> None:
        kind, job = self.kinds[device[0]], self.jobs[job_id]
        self.pay(kind, begun, now)
        job.held, job.done, job.moved_at = job.held - 1, job.done + 1, now
        self.result.by_pool[kind.name] += 1
        self.result.misplaced += not job.placement.allows(kind.site)
        if not job.groups and not job.held:
            job.ended_at = self.result.ended_at = now
            if job.deadline_at is not None and now > job.deadline_at:
                self.result.late.add(job_id)

    def lose(self, now: float, device: tuple[int, int], until: float) -> None:
        """Its group is ready again at once, as after a notice of loss."""
        doing = next((e for e in self.events if e[1] == self.claim_of[device]), None)
        if doing is not None and doing[2] == "done":
            job_id, begun = doing[4]  # type: ignore[misc]  # a job and a time
            self.pay(self.kinds[device[0]], begun, now)
            job = self.jobs[job_id]
            job.groups, job.held = job.groups + 1, job.held - 1
            self.result.lost_groups += 1
        self.gone_since[device] = now
        self.claim_of[device] = self.push(until, "free", device)

    def pay(self, kind: Kind, begun: float, ended: float) -> None:
        at = begun
        while at < ended:
            hour_end = min(ended, (at // HOUR + 1) * HOUR)
            self.result.usd += (hour_end - at) / HOUR * self.usd(kind, at)
            at = hour_end

    # --- what a worker can know ---------------------------------------------------------------
    def usd(self, kind: Kind, now: float) -> float:
        prices = self.trace.prices[kind.name]
        return prices[min(int(now // HOUR), len(prices) - 1)]

    def pool(self, kind: Kind, now: float) -> Pool:
        return Pool(kind.name, round(1e6 * self.usd(kind, now)), kind.is_spot)

    def alive(self, now: float) -> Iterable[Kind]:
        """Devices are missed only after a while."""
        for k, kind in enumerate(self.kinds):
            for d in range(kind.devices):
                since = self.gone_since.get((k, d))
                if since is None or now - since < SILENCE_SEC:
                    yield kind

    def works(self, now: float) -> list[Work]:
        alive = Counter(self.alive(now))
        return [
            Work(
                job_id=job.job_id,
                tenant=job.tenant,
                priority=job.priority,
                created_at=job.created_at,
                deadline_at=job.deadline_at,
                rows=(job.groups + job.held) * GROUP_ROWS,
                is_read=True,
                sec_per_row=job.sec_per_row if job.done else None,
                group_rows=GROUP_ROWS,
                moved_at=job.moved_at,
                devices={
                    self.pool(kind, now): n
                    for kind, n in alive.items()
                    if job.placement.allows(kind.site)
                },
            )
            for job in self.jobs.values()
            if job.created_at <= now and (job.groups or job.held)
        ]
