"""What workers lean on gives way: Redis forgets or restarts, PostgreSQL restarts, S3 answers badly.

Jobs are a little slower here (the stand-in takes its time), so that it happens in their midst.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import S3
from faults.sites import Jolt, Jolts

from specbatch.jobs.chaos.forkserver import ForkServer
from specbatch.jobs.chaos.harness import Ran, Site, site
from specbatch.jobs.chaos.plan import Deed, Disturbance, Plan
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.crash_points import CrashPoint
from specbatch.schemas.errors import ObjectError
from support.faulty_s3 import Fault, FaultyS3, Seeded
from support.rabbit import PrivateRabbit
from support.servers import PrivatePostgres, PrivateRedis

STEP_SEC = 0.01


def plan(seed: int, *disturbances: Disturbance) -> Plan:
    return Plan(seed, disturbances, group_size=3, writes_ahead=True, message_seed=seed)


def held(ran: Ran) -> None:
    assert ran.violations == []
    assert not ran.missed


@contextmanager
def over(
    folder: Path, broker_url: str, forkserver: ForkServer | None, **urls: str
) -> Iterator[Site]:
    with site(  # type: ignore[misc]  # only URLs are given
        folder / "site", broker_url, step_sec=STEP_SEC, forkserver=forkserver, **urls
    ) as made:
        yield made


@pytest.fixture(scope="module")
def on_postgres(
    postgres_server: PrivatePostgres,
    migrated_postgres: str,
    forkserver: ForkServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    """A site whose PostgreSQL stays as it is."""
    url = postgres_server.create_database(like=migrated_postgres)
    folder = tmp_path_factory.mktemp("postgres")
    with PrivateRedis() as redis, over(folder, redis.url, forkserver, database_url=url) as here:
        yield here


# --- brokers --------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def mortal_redis() -> Iterator[PrivateRedis]:
    """Of these tests: it is killed and restarted."""
    with PrivateRedis() as made:
        yield made


@pytest.fixture(scope="module")
def on_redis(
    mortal_redis: PrivateRedis, forkserver: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    with over(tmp_path_factory.mktemp("redis"), mortal_redis.url, forkserver) as here:
        yield here


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_redis_forgets_everything(on_redis: Site, mortal_redis: PrivateRedis, seed: int) -> None:
    flushes = Jolts(
        *(Jolt("FLUSHALL", lambda: forget(mortal_redis), at_rows=rows) for rows in (0, 1, 6))
    )
    held(on_redis.run(plan(seed), flushes))
    assert len(flushes.done) == 3


def forget(redis: PrivateRedis) -> None:
    assert redis.talk("FLUSHALL") == "+OK"


def test_redis_crashes_and_comes_back_empty(on_redis: Site, mortal_redis: PrivateRedis) -> None:
    def crash() -> None:
        mortal_redis.kill()
        mortal_redis.start()
        forget(mortal_redis)  # what it kept, and what unacknowledged messages it would restore

    kill = Disturbance(CrashPoint.VERIFY, Deed.KILL, nth=3)
    restarts = Jolts(Jolt("restart", crash))
    held(on_redis.run(plan(1, kill), restarts))
    assert restarts.done == ["restart"]


def test_rabbitmq_restarts(
    own_rabbit: PrivateRabbit, forkserver: ForkServer, tmp_path: Path
) -> None:
    with over(tmp_path, own_rabbit.url, forkserver) as here:
        for seed, end in enumerate((own_rabbit.kill, own_rabbit.stop)):

            def restart(end: object = end) -> None:
                assert callable(end)
                end()
                own_rabbit.start()

            kill = Disturbance(CrashPoint.SUBMIT, Deed.KILL, nth=2)
            restarts = Jolts(Jolt("restart", restart))
            held(here.run(plan(seed, kill), restarts))
            assert restarts.done == ["restart"]


# --- PostgreSQL -----------------------------------------------------------------------------
def test_postgres_crashes_and_restarts(
    own_postgres: PrivatePostgres, redis_url: str, forkserver: ForkServer, tmp_path: Path
) -> None:
    def crash() -> None:
        own_postgres.kill()
        own_postgres.start()

    url = own_postgres.create_database()
    with over(tmp_path, redis_url, forkserver, database_url=url) as here:
        for seed, what in enumerate((crash, own_postgres.restart)):
            restarts = Jolts(Jolt("restart", what))
            held(here.run(plan(seed), restarts))
            assert restarts.done == ["restart"]


@pytest.mark.parametrize(
    "point", [CrashPoint.SQL_COMMIT, pytest.param(CrashPoint.COMMITTED, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    ("seed", "times"),
    [
        (0, (1, 4, 9)),
        pytest.param(1, (2, 7, 12), marks=pytest.mark.long),
        pytest.param(2, (3, 8, 15), marks=pytest.mark.long),
    ],
)
def test_commits_on_postgres_fail_or_their_answers_are_lost(
    on_postgres: Site, point: CrashPoint, seed: int, times: tuple[int, ...]
) -> None:
    broken = [Disturbance(point, Deed.BREAK, nth=nth, variant=i) for i, nth in enumerate(times)]
    held(on_postgres.run(plan(seed, *broken)))


@pytest.mark.parametrize("deed", [Deed.KILL, pytest.param(Deed.FREEZE, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "runs", [[(3, 8, 13)], pytest.param([(3,), (8,), (13,)], marks=pytest.mark.long)]
)
def test_workers_end_in_the_middle_of_transactions_on_postgres(
    on_postgres: Site, deed: Deed, runs: list[tuple[int, ...]]
) -> None:
    for seed, times in enumerate(runs):
        hit = [Disturbance(CrashPoint.SQL_COMMIT, deed, nth=nth) for nth in times]
        held(on_postgres.run(plan(seed, *hit)))


# --- S3 -------------------------------------------------------------------------------------
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(3), marks=pytest.mark.long)])
def test_s3_is_busy_slow_cut_off_and_truncates(
    s3: S3, redis_url: str, tmp_path: Path, seeds: range
) -> None:
    faults = Seeded(11)
    with (
        FaultyS3(s3.endpoint_url, faults) as proxy,
        over(
            tmp_path,
            redis_url,
            None,  # what forks the workers is to know how to reach this S3
            workspace=f"{s3.uri}/work",
            s3_endpoint_url=s3.endpoint_url,
            workers_s3_url=proxy.url,
        ) as here,
    ):
        for seed in seeds:
            held(here.run(plan(seed)))
        held(here.run(plan(3, Disturbance(CrashPoint.UPLOAD, Deed.KILL))))
        held(here.run(plan(4, Disturbance(CrashPoint.MANIFEST, Deed.FREEZE))))
        assert set(faults.done) >= {*Seeded.OF_METHOD["GET"], *Seeded.OF_METHOD["PUT"]}


def test_half_a_marker_is_noticed_and_taken_away(s3: S3) -> None:
    with FaultyS3(s3.endpoint_url) as proxy:
        proxy.fail(Fault.CUT_UPLOAD, "PUT")
        objects = Objects(proxy.url)
        with pytest.raises(ObjectError, match="did not arrive whole"):
            objects.put_new(f"{s3.uri}/marker", b"whose job it is")
        assert not objects.exists(f"{s3.uri}/marker")
        assert objects.put_new(f"{s3.uri}/marker", b"whose job it is")


# --- disks ----------------------------------------------------------------------------------
def test_the_disk_is_full_wherever_something_is_written(
    redis_url: str, forkserver: ForkServer, tmp_path: Path
) -> None:
    with over(tmp_path, redis_url, forkserver) as here:
        points = (
            CrashPoint.ARTEFACT_WRITE,
            CrashPoint.DRAFT_WRITE,
            CrashPoint.UPLOAD,
            CrashPoint.MANIFEST,
            CrashPoint.SQL_COMMIT,
        )
        full = [Disturbance(p, Deed.BREAK, variant=p is CrashPoint.SQL_COMMIT) for p in points]
        ran = here.run(plan(0, *full))
        held(ran)
        log = "".join(p.read_text() for p in here.folder.glob("worker-*.log"))
        assert "no space left on device" in log
        assert "database or disk is full" in log
