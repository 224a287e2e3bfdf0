"""What attempts used beside devices: stored with their results, once, whoever is killed when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, cast

import pytest
from faults.in_process import Died, Shop, armed, attempt, shop
from faults.test_money import Mortal
from sqlalchemy import select

from specbatch.jobs.chaos.conservation import usage_violations
from specbatch.jobs.cli.cost import cost_of
from specbatch.pipeline.bootstrap import Worker
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.crash_points import CrashPoint
from specbatch.schemas.records import Stage
from specbatch.schemas.tables import StageUsage
from specbatch.schemas.timekeeping import UNITS_PER_USD
from specbatch.schemas.usage import NO_GROUP

BOOK = {
    "cpu_hour": 0.048,
    "store_statements": 0.2,
    "object_writes": 0.005,
    "object_reads": 0.0004,
    "stored_gb": 0.023,
    "sent_gb": 0.01,
    "received_gb": 0.09,
}
# How many of a counter a price is for, said again: nothing here is taken from what is tested.
PER = {
    "cpu_hour": ("cpu_ticks", 36_000_000_000),
    "store_statements": ("store_statements", 1_000_000),
    "object_writes": ("object_writes", 1_000),
    "object_reads": ("object_reads", 1_000),
    "stored_gb": ("stored_bytes", 1_000_000_000),
    "sent_gb": ("sent_bytes", 1_000_000_000),
    "received_gb": ("received_bytes", 1_000_000_000),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with shop(tmp_path_factory.mktemp("usage")) as made:
        made.settings = made.settings.model_copy(update={"price_book": BOOK})
        yield made


@pytest.fixture
def bed(shared: Shop) -> Iterator[Shop]:
    """It is every test's; whoever a test hires leaves with it."""
    yield shared
    shared.dismiss_hired()


def rows_of(bed: Shop, job_id: str) -> list[Any]:
    query = select(*StageUsage.__table__.c).where(StageUsage.job_id == job_id)
    with cast(Any, bed.store)._db._reader.connect() as connection:
        return list(connection.execute(query))


def units_of(row: Any) -> Fraction:
    """By the book, in the smallest units."""
    usd = sum(
        Fraction(getattr(row, counter)) / per * Fraction(str(BOOK[name]))
        for name, (counter, per) in PER.items()
    )
    return usd * UNITS_PER_USD


def device_units(bed: Shop, job_id: str, stage: Stage) -> int:
    slices = bed.store.time_slices(job_id)
    of_stage = [one for one in slices if one.attempt.stage is stage]
    return sum(one.ticks.total * one.device.price_microusd for one in of_stage)


def assert_whole(bed: Shop, job_id: str) -> None:
    """The bill by stage is quantities times prices, and the job's whole price, to the last unit."""
    cost = cost_of(bed.store, bed.store.get_job(job_id))
    rows = rows_of(bed, job_id)
    for stage, one in cost.by_stage.items():
        of_stage = [row for row in rows if row.stage == stage.value]
        used = sum(map(units_of, of_stage), Fraction(0))
        assert one.total == used + device_units(bed, job_id, stage), stage
        given_up = sum((units_of(row) for row in of_stage if not row.kept), Fraction(0))
        lost_time = sum(
            s.ticks.total * s.device.price_microusd
            for s in bed.store.time_slices(job_id)
            if s.attempt.stage is stage and not s.kept
        )
        assert one.lost == given_up + lost_time, stage
    assert cost.total.units == sum(one.total for one in cost.by_stage.values())
    assert list(usage_violations(bed.store, bed.store.get_job(job_id))) == []


def kept(bed: Shop, job_id: str, stage: Stage) -> list[int]:
    """The groups whose attempts at the stage are kept."""
    rows = [row for row in rows_of(bed, job_id) if row.stage == stage.value and row.kept]
    return sorted(row.group_index for row in rows)


def test_a_job_costs_what_its_stages_used_at_the_prices_of_the_book(bed: Shop) -> None:
    bed.hire()
    job_id = bed.submit()
    bed.drain(job_id, bed.workers[-1])
    assert_whole(bed, job_id)
    groups = bed.store.progress(job_id).groups_total
    assert kept(bed, job_id, Stage.RECORD) == list(range(groups))
    assert kept(bed, job_id, Stage.VERIFY) == list(range(groups))
    assert set(kept(bed, job_id, Stage.INGEST)) == {NO_GROUP}
    assert kept(bed, job_id, Stage.PUBLISH) == [NO_GROUP]
    for row in rows_of(bed, job_id):
        assert row.cpu_ticks > 0, row.stage
        assert row.store_statements >= 2, row.stage
        assert row.object_writes == row.object_reads == row.sent_bytes == 0, "all is local"
    by_stage = cost_of(bed.store, bed.store.get_job(job_id)).by_stage
    for stage in (Stage.INGEST, Stage.VERIFY, Stage.PUBLISH):
        assert by_stage[stage].used.stored_bytes > 0, stage
    assert all(one.lost == 0 for one in by_stage.values())


@pytest.mark.parametrize("point", [CrashPoint.SQL_COMMIT, CrashPoint.COMMITTED])
@pytest.mark.parametrize("stage", [Stage.INGEST, Stage.VERIFY, Stage.RECORD, Stage.PUBLISH])
def test_a_worker_that_is_killed_before_or_after_a_commit_loses_and_doubles_nothing(
    bed: Shop, stage: Stage, point: CrashPoint
) -> None:
    job_id = bed.submit()
    way = Mortal(bed.store)
    mortal = bed.hire(cast(Store, way))
    message = until(bed, job_id, stage, mortal)
    with armed(killing(mortal, way, point)):
        attempt(mortal, message)
    assert way.is_dead
    bed.hire()
    bed.drain(job_id, bed.workers[-1])
    assert_whole(bed, job_id)
    groups = bed.store.progress(job_id).groups_total
    assert kept(bed, job_id, Stage.RECORD) == kept(bed, job_id, Stage.VERIFY) == list(range(groups))
    assert kept(bed, job_id, Stage.PUBLISH) == [NO_GROUP]


def test_what_a_killed_attempt_had_used_by_its_last_heartbeat_is_lost(bed: Shop) -> None:
    job_id = bed.submit()
    way = Mortal(bed.store)
    mortal = bed.hire(cast(Store, way))
    message = until(bed, job_id, Stage.RECORD, mortal)
    kill = killing(mortal, way, CrashPoint.SQL_COMMIT)

    def beat_then_die(point: CrashPoint) -> None:
        if point is CrashPoint.LEASE:
            mortal.lease_keeper.report_usage()
        kill(point)

    with armed(beat_then_die):
        attempt(mortal, message)
    [dead] = [row for row in rows_of(bed, job_id) if row.stage == Stage.RECORD.value]
    assert not dead.kept
    in_flight = cost_of(bed.store, bed.store.get_job(job_id)).by_stage[Stage.RECORD]
    assert in_flight.pending == units_of(dead) > 0
    bed.hire()
    bed.drain(job_id, bed.workers[-1])
    assert_whole(bed, job_id)
    cost = cost_of(bed.store, bed.store.get_job(job_id)).by_stage[Stage.RECORD]
    assert (cost.lost, cost.pending) == (units_of(dead), 0)


def test_an_attempt_that_fails_is_lost_with_all_that_it_used(bed: Shop) -> None:
    job_id = bed.submit()
    worker = bed.hire()
    message = until(bed, job_id, Stage.RECORD, worker)

    def fail(point: CrashPoint) -> None:
        if point is CrashPoint.LEASE:
            raise ValueError("a bug")

    with armed(fail):
        attempt(worker, message)
    [failed] = [row for row in rows_of(bed, job_id) if row.stage == Stage.RECORD.value]
    assert not failed.kept
    assert failed.store_statements > 0
    bed.drain(job_id, worker)
    assert_whole(bed, job_id)
    lost = cost_of(bed.store, bed.store.get_job(job_id)).by_stage[Stage.RECORD].lost
    assert lost == units_of(failed) > 0


def killing(worker: Worker, way: Mortal, point: CrashPoint) -> Callable[[CrashPoint], None]:
    """Kills the worker at this point of the transaction that has an attempt's last results."""
    main = threading.get_ident()

    def die(reached: CrashPoint) -> None:
        held = list(worker.lease_keeper._held.values())
        ends = any(one.usage.is_over for one in held) and threading.get_ident() == main
        if reached is point and ends and not way.is_dead:
            way.is_dead = True
            raise Died

    return die


def until(bed: Shop, job_id: str, stage: Stage, worker: Worker) -> Any:
    """Work until a unit is due at the stage; which."""
    for _ in range(100):
        due = [message for message in bed.store.due() if message.job_id == job_id]
        found = [message for message in due if message.stage is stage]
        if found:
            return found[0]
        attempt(worker, due[0])
    raise AssertionError(f"nothing is due at {stage}")
