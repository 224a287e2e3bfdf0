"""Seeded runs on the real engine with the demo pair.

Nine are in this process, one for each crash point of a stage: a thread ends there as in a crash
(nobody gives its lease back) or an error is raised there. The others are processes over Redis: in
one run by default they meet each deed within a pass and one in a commit.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
from faults.in_process import Died, Shop, armed, shop

from specbatch.jobs.chaos.faults import errors_at
from specbatch.jobs.chaos.harness import Site, site
from specbatch.jobs.chaos.plan import Deed, Disturbance, Plan, plan_of
from specbatch.schemas.crash_points import CrashPoint
from specbatch.schemas.errors import DeviceLostError
from support.servers import PrivateRedis, ServerError

IN_PROCESS = (*range(9), *(pytest.param(n, marks=pytest.mark.long) for n in range(9, 12)))
LONG = range(8, 28)
STAGES_REACH = [point for point in CrashPoint if point is not CrashPoint.ACK]  # that is a task's


# --- threads --------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with shop(tmp_path_factory.mktemp("real"), "real") as made:
        yield made


class Strike:
    """What befalls this process's threads at one point, for the `nth` time."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.point = STAGES_REACH[seed % len(STAGES_REACH)]
        self.nth = (
            1 if self.point in (CrashPoint.UPLOAD, CrashPoint.MANIFEST) else draw.randint(1, 3)
        )
        self.plan = Plan(seed, (), group_size=draw.choice((3, 4, 6)), writes_ahead=True)
        errors = [e for e in errors_at(self.point, False) if not isinstance(e, DeviceLostError)]
        self.error: BaseException = draw.choice([Died(), *errors])
        self.fired = False
        self._times = 0
        self._test = threading.current_thread()

    def __call__(self, point: CrashPoint) -> None:
        here = threading.current_thread() is self._test
        if point is not self.point or not (here or point is CrashPoint.VERIFY):
            return
        self._times += 1
        if self._times == self.nth:
            self.fired = True
            # The engine's own thread outlives errors only: its end is the process's.
            raise self.error if here else RuntimeError("a pass failed")


@pytest.mark.parametrize("seed", IN_PROCESS)
def test_a_thread_ends_or_fails(bed: Shop, seed: int) -> None:
    strike = Strike(seed)
    job_id = bed.submit(strike.plan)
    with armed(strike):
        bed.drain(job_id)
    assert strike.fired
    assert bed.report(job_id).violations == ()


# --- processes ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    server = PrivateRedis()
    try:
        server.__enter__()
    except ServerError as error:
        pytest.fail(str(error), pytrace=False)
    try:
        with site(tmp_path_factory.mktemp("pair"), server.url, engine="real") as made:
            yield made
    finally:
        server.__exit__()


_AT_ONCE = (
    Disturbance(CrashPoint.VERIFY, Deed.FREEZE, nth=2),
    Disturbance(CrashPoint.VERIFY, Deed.KILL, nth=3),
    Disturbance(CrashPoint.VERIFY, Deed.BREAK, nth=5),
    Disturbance(CrashPoint.SQL_COMMIT, Deed.KILL, nth=9),
)
_FURTHER = (
    Disturbance(CrashPoint.SUBMIT, Deed.FREEZE, nth=2),
    Disturbance(CrashPoint.SUBMIT, Deed.BREAK),
    Disturbance(CrashPoint.ARTEFACT_WRITE, Deed.FREEZE, nth=4),
    Disturbance(CrashPoint.DRAFT_WRITE, Deed.BREAK, nth=2),
)


@pytest.mark.parametrize(
    "disturbances",
    [_AT_ONCE, *(pytest.param((one,), marks=pytest.mark.long) for one in _AT_ONCE + _FURTHER)],
    ids=lambda several: "-".join(f"{one.deed}-{one.point}" for one in several),
)
@pytest.mark.parametrize("unruly", [5, pytest.param(None, marks=pytest.mark.long)])
def test_processes_are_killed_frozen_and_broken(
    pair: Site, disturbances: tuple[Disturbance, ...], unruly: int | None
) -> None:
    ran = pair.run(Plan(0, disturbances, group_size=4, writes_ahead=True, message_seed=unruly))
    assert set(ran.fired) == set(disturbances)
    assert len(ran.fired) == len(disturbances)
    assert ran.violations == []
    assert ran.restarts == sum(one.deed is Deed.KILL for one in disturbances)


@pytest.mark.long
@pytest.mark.parametrize("seed", LONG)
def test_a_process_is_disturbed_by_a_seed(pair: Site, seed: int) -> None:
    ran = pair.run(plan_of(seed, 2))
    assert ran.violations == []
    assert not ran.missed
