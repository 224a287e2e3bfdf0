"""Crash points are where they say, in the order of the work, and silent unless they are armed."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator

import pytest
from faults.in_process import Died, Shop, armed, shop

from specbatch.schemas import crash_points
from specbatch.schemas.crash_points import CrashPoint
from specbatch.schemas.records import JobState, Stage
from support.tree import modules

IN_STAGES = {  # ACK is reached by a task, not by a stage
    CrashPoint.LEASE,
    CrashPoint.ARTEFACT_WRITE,
    CrashPoint.DRAFT_WRITE,
    CrashPoint.SUBMIT,
    CrashPoint.VERIFY,
    CrashPoint.SQL_COMMIT,
    CrashPoint.COMMITTED,
    CrashPoint.UPLOAD,
    CrashPoint.MANIFEST,
}


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with shop(tmp_path_factory.mktemp("points")) as made:
        yield made


class Watch:
    """Writes down what this test's threads reach; the lease keeper's heartbeats are not counted."""

    def __init__(self) -> None:
        self.seen: list[CrashPoint] = []

    def __call__(self, point: CrashPoint) -> None:
        if threading.current_thread().name != "lease-keeper":
            self.seen.append(point)


def points_of(bed: Shop, job_id: str, stage: Stage) -> list[CrashPoint]:
    """What the first unit at `stage` comes to; the units before it are done, too."""
    while True:
        watch = Watch()
        with armed(watch):
            message = bed.do_next(job_id)
        if message.stage is stage:
            return watch.seen


def test_a_job_reaches_its_points_in_the_order_of_its_work(bed: Shop) -> None:
    job_id = bed.submit()
    claim = [CrashPoint.SQL_COMMIT, CrashPoint.COMMITTED]
    ingest = points_of(bed, job_id, Stage.INGEST)
    assert ingest[:3] == [*claim, CrashPoint.LEASE]
    writes = [i for i, point in enumerate(ingest) if point is CrashPoint.ARTEFACT_WRITE]
    assert len(writes) == 3
    assert set(ingest[3 : writes[0]]) == set(claim), "nothing is written before the job is known"
    assert ingest[writes[-1] + 1 :] == claim * 2, "the groups, and that the input is read"
    propose = points_of(bed, job_id, Stage.PROPOSE)
    work = [p for p in propose if p is not CrashPoint.VERIFY]
    assert work == [*claim, CrashPoint.LEASE, CrashPoint.SUBMIT, CrashPoint.DRAFT_WRITE, *claim]
    verify = points_of(bed, job_id, Stage.VERIFY)
    work = [p for p in verify if p is not CrashPoint.VERIFY]
    pinned, work = work[: len(claim)], work[len(claim) :]
    assert pinned == claim, "the job's numeric class"
    assert work == [*claim, CrashPoint.LEASE, CrashPoint.SUBMIT, CrashPoint.ARTEFACT_WRITE, *claim]
    assert verify.count(CrashPoint.VERIFY) > 1
    record = points_of(bed, job_id, Stage.RECORD)
    assert record == [*claim, CrashPoint.LEASE, *claim]
    publish = points_of(bed, job_id, Stage.PUBLISH)
    upload, manifest = publish.index(CrashPoint.UPLOAD), publish.index(CrashPoint.MANIFEST)
    assert publish[:3] == [*claim, CrashPoint.LEASE]
    assert 3 <= upload < manifest
    assert publish[-2:] == claim
    assert bed.report(job_id).violations == ()


@pytest.mark.parametrize("point", sorted(IN_STAGES))
def test_a_thread_that_ends_there_costs_nothing_but_time(bed: Shop, point: CrashPoint) -> None:
    died: list[CrashPoint] = []
    test = threading.current_thread()

    def die(reached: CrashPoint) -> None:
        # In the engine's own thread a crash takes the process: that is another test's.
        if reached is point and not died:
            died.append(reached)
            raise Died if threading.current_thread() is test else RuntimeError("a pass failed")

    job_id = bed.submit()
    with armed(die):
        bed.drain(job_id)
    assert died == [point]
    assert bed.store.get_job(job_id).state is JobState.PARTIAL  # it has bad rows
    assert bed.report(job_id).violations == ()


def test_nothing_listens_unless_it_is_armed() -> None:
    for point in CrashPoint:
        crash_points.reach(point)
    watch = Watch()
    with armed(watch):
        crash_points.reach(CrashPoint.ACK)
    crash_points.reach(CrashPoint.LEASE)
    assert watch.seen == [CrashPoint.ACK]


def test_every_point_is_reached_somewhere_and_armed_only_by_chaos() -> None:
    reached, arming = set(), []
    for module in modules():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id == "reach":
                reached.add(ast.unparse(node.args[0]))
            if ast.unparse(node.func) == "crash_points.arm":
                arming.append(module.name)
    assert reached == {f"CrashPoint.{point.name}" for point in CrashPoint}
    assert arming == ["jobs.chaos.worker"]
