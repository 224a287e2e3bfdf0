"""Fifty seeded runs with crashes: what all rows cost, and all that was lost, idle or overhead, is
what was leased, to the last unit of money.

In each run workers of two prices do a job. At seeded places a worker is killed (its process says
nothing any more to the store), frozen until it was given up and others have done its work, or meets
an error of its disk, its device or the database; and hearts beat at any time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from faults.in_process import LEASE_SEC, Died, Shop, armed, attempt, shop

from specbatch.jobs.chaos.conservation import job_time_violations
from specbatch.jobs.chaos.faults import errors_at
from specbatch.jobs.chaos.forkserver import ForkServer
from specbatch.jobs.chaos.harness import site
from specbatch.jobs.chaos.plan import Deed, Plan, plan_of
from specbatch.pipeline.bootstrap import Worker
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.policy.costs.balance import job_sheet, leased, rows_sheet, sessions_sheet
from specbatch.schemas.crash_points import CrashPoint
from specbatch.schemas.errors import DeviceLostError
from specbatch.schemas.provenance import TimeKind
from specbatch.schemas.records import DueWork, JobState
from specbatch.schemas.timekeeping import LEASES_OF_SILENCE

RUNS = range(12), pytest.param(range(12, 60), marks=pytest.mark.long)
PRICES_USD = (0.200001, 3.75)
MOST_UNITS_OF_WORK = 400
STEP_SEC = 0.0002
OF_THE_STORE = {CrashPoint.SQL_COMMIT, CrashPoint.COMMITTED}  # a heart beats in other threads


class Mortal:
    """A worker's way to the store, until it dies."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_dead = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_dead:
                raise Died
            return found(*args, **kwargs)

        return call


@dataclass
class Staff:
    """The workers of a run, and what befalls them."""

    bed: Shop
    job_id: str
    draw: random.Random
    alive: list[tuple[Worker, Mortal]] = field(default_factory=list)
    met: set[Deed] = field(default_factory=set)
    _open: int = 0  # deeds that are still to be done
    _is_doing: bool = False  # one of them
    _in_work: tuple[Worker, Mortal] | None = None

    def __post_init__(self) -> None:
        self._open = self.draw.randint(2, 5)
        for price in PRICES_USD:
            self.hire(price)

    def hire(self, usd_per_hour: float) -> None:
        way = Mortal(self.bed.store)
        self.alive.append((self.bed.hire(cast(Store, way), usd_per_hour), way))

    def work(self) -> None:
        """Do what is due until the job has ended."""
        store = self.bed.store
        for _ in range(MOST_UNITS_OF_WORK):
            if store.get_job(self.job_id).state.is_final:
                return
            due = [message for message in store.due() if message.job_id == self.job_id]
            if not due:
                self.bed.clock.advance(LEASE_SEC + 1)
                continue
            self.do(self.draw.choice(self.alive), self.draw.choice(due))
        raise AssertionError(f"job {self.job_id} does not end")

    def do(self, one: tuple[Worker, Mortal], message: DueWork) -> None:
        worker, way = one
        self._in_work = one
        with armed(self.reached):
            attempt(worker, message)
        if way.is_dead or has_lost_its_device(worker):
            self.replace(one)
        elif self.draw.random() < 0.3:
            beat(worker)

    def replace(self, one: tuple[Worker, Mortal]) -> None:
        """It is gone, with a last word or without; another one comes."""
        self.let_go(one)
        self.hire(self.draw.choice(PRICES_USD))

    def let_go(self, one: tuple[Worker, Mortal]) -> None:
        worker, way = one
        self.alive.remove(one)
        self.bed.dismiss(worker)
        self.bed.workers.remove(worker)
        if not way.is_dead:
            assert worker.timekeeper is not None
            worker.timekeeper.close()

    def reached(self, point: CrashPoint) -> None:
        """Called in a worker's thread, or its engine's."""
        assert self._in_work is not None
        worker, way = self._in_work
        if way.is_dead or self._is_doing:
            return
        self._is_doing = True
        try:
            if point not in OF_THE_STORE and self.draw.random() < 0.05:
                beat(worker)
            if self._open and self.draw.random() < 0.04:
                self._open -= 1
                self.meet(point, way)
        finally:
            self._is_doing = False

    def meet(self, point: CrashPoint, way: Mortal) -> None:
        deed = self.draw.choice(list(Deed))
        if deed is Deed.FREEZE and point in (CrashPoint.SQL_COMMIT, CrashPoint.VERIFY):
            deed = Deed.KILL
        self.met.add(deed)
        match deed:
            case Deed.KILL:
                way.is_dead = True
                # An engine's thread lets its tickets go; the thread that waits for them dies then.
                raise RuntimeError("killed") if point is CrashPoint.VERIFY else Died
            case Deed.FREEZE:
                self.freeze()
            case Deed.BREAK:
                raise self.draw.choice(errors_at(point, on_postgres=False))

    def freeze(self) -> None:
        """The worker stands still; the store gives it up, and others may do its work."""
        frozen = self._in_work
        others = [one for one in self.alive if one is not frozen]
        self.bed.clock.advance(LEASES_OF_SILENCE * LEASE_SEC + 1)
        self.bed.store.end_silent_sessions(LEASES_OF_SILENCE * LEASE_SEC)
        for _ in range(self.draw.randint(0, 3)):
            due = [message for message in self.bed.store.due() if message.job_id == self.job_id]
            if due and others:
                self._in_work = self.draw.choice(others)
                if not self._in_work[1].is_dead:
                    attempt(self._in_work[0], self.draw.choice(due))
        self._in_work = frozen

    def leave(self) -> None:
        """Those who live say their last word; those who do not are missed."""
        for one in list(self.alive):
            self.let_go(one)
        self.bed.clock.advance(1)
        self.bed.store.end_silent_sessions(0.5)


def beat(worker: Worker) -> None:
    assert worker.timekeeper is not None
    worker.timekeeper.beat()


def has_lost_its_device(worker: Worker) -> bool:
    try:
        for host in worker.engines:
            host.check()
    except DeviceLostError:
        return True
    return False


def all_time_violations(store: Store) -> Iterator[str]:
    """Check the device time of ended workers and of all their jobs."""
    sessions = store.sessions()
    for session in sessions:
        if session.leased is None:
            yield f"session {session.session_id} has not ended"
        elif session.leased != session.accounted:
            yield (
                f"session {session.session_id} was leased for {session.leased} units, of which "
                f"{session.accounted} are somewhere"
            )
    total = sessions_sheet(sessions)
    for job in store.list_jobs(limit=1_000_000):
        times, rows = store.job_times(job.job_id), store.row_times(job.job_id)
        sheet = job_sheet(times, rows, job.state.is_final)
        total += sheet
        if sheet.of(TimeKind.LOST).units < 0 or sheet.pending.units < 0:
            yield f"the rows of job {job.job_id} were given more than it had"
        if sheet.total.units < rows_sheet(rows).total.units:
            yield f"job {job.job_id} cost less than its rows"
    if total.total != leased(sessions):
        yield f"{leased(sessions)} was leased, and {total.total} is somewhere"


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with shop(tmp_path_factory.mktemp("money"), step_sec=STEP_SEC) as made:
        (first,) = made.workers  # it has learned what the job gives
        made.dismiss(first)
        made.workers.clear()
        assert first.timekeeper is not None
        first.timekeeper.close()
        yield made


@pytest.mark.parametrize("seeds", RUNS)
def test_rows_and_losses_are_what_was_leased_in_runs_with_crashes(bed: Shop, seeds: range) -> None:
    met: set[Deed] = set()
    lost = 0
    for seed in seeds:
        draw = random.Random(seed)
        before = {session.session_id for session in bed.store.sessions()}
        job_id = bed.submit(plan_of(seed, 2))
        staff = Staff(bed, job_id, draw)
        staff.work()
        staff.leave()
        met |= staff.met
        job = bed.store.get_job(job_id)
        assert job.state is JobState.PARTIAL, seed  # it has bad rows
        assert list(job_time_violations(bed.store, job)) == [], seed
        sessions = [s for s in bed.store.sessions() if s.session_id not in before]
        assert all(s.leased == s.accounted for s in sessions), seed
        rows = bed.store.row_times(job_id)
        sheet = job_sheet(bed.store.job_times(job_id), rows, is_final=True)
        lost_units = sum(
            s.ticks.total * s.device.price_microusd
            for s in bed.store.time_slices(job_id)
            if not s.kept
        )
        assert sheet.of(TimeKind.LOST).units == lost_units, seed
        beside = sessions_sheet(sessions).total
        given = rows_sheet(rows).total
        assert given.units + lost_units + beside.units == leased(sessions).units, seed
        lost += lost_units > 0
    assert met == set(Deed)
    assert lost > len(seeds) / 8, "there was something to lose"
    assert list(all_time_violations(bed.store)) == []


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 60), marks=pytest.mark.long)])
def test_so_it_is_with_processes_that_are_killed_and_frozen(
    seeds: range, tmp_path: Path, redis_url: str, forkserver: ForkServer
) -> None:
    with site(tmp_path / "site", redis_url, step_sec=0.002, forkserver=forkserver) as here:
        for seed in seeds:
            ran = here.run(plan_of(seed, 2))
            assert ran.violations == []
        here.run(Plan(0, (), group_size=4, writes_ahead=True))
    store = open_store(f"sqlite:///{tmp_path / 'site' / 'specbatch.db'}")
    try:
        store.end_silent_sessions(0.0)
        assert list(all_time_violations(store)) == []
        sheet = sessions_sheet(store.sessions())
        assert sheet.of(TimeKind.IDLE, TimeKind.OVERHEAD).ticks > 0
    finally:
        store.close()
