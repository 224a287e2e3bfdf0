"""Brokers that forget, die and speak nonsense: a job is done all the same, bit for bit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import redis
import yaml

from specbatch.pipeline.bootstrap import make_store
from specbatch.schemas.records import Stage
from specbatch.schemas.routing import queue_for
from specbatch.schemas.settings import Settings
from support import demo
from support.outcomes import Outcome, outcome
from support.rabbit import PrivateRabbit
from support.servers import PrivateRedis
from support.workers import WorkerProcess, command, wait_until, worker

ROWS, GROUPS = 16, 8
OF_MODEL = ("--verifier", str(demo.VERIFIER), "--concurrency", "2")


def spec_of(folder: Path) -> str:
    pq.write_table(pq.read_table(demo.PROMPTS).slice(0, ROWS), folder / "prompts.parquet")
    spec = {
        "input": {"uri": "prompts.parquet"},
        "output": {"uri": "out"},
        "verifier": str(demo.VERIFIER),
        "sampling": {"max_tokens": 64, "temperature": 0.8, "seed": 3, "ignore_eos": True},
        "group_size": ROWS // GROUPS,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(spec))
    return "job.yaml"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    home = tmp_path_factory.mktemp("undisturbed")
    environment = {"SPECBATCH_WORKSPACE": str(home / "workspace")}
    report = command("submit-job", spec_of(home), "--local", environment=environment, cwd=home)
    with closing(make_store(Settings(workspace=str(home / "workspace")))) as store:
        return outcome(store, report["job"])


class Site:
    """A job over a broker, with short leases."""

    def __init__(self, broker_url: str, home: Path) -> None:
        self.home = home
        self.environment = {
            "SPECBATCH_BROKER_URL": broker_url,
            "SPECBATCH_WORKSPACE": str(home / "workspace"),
            "SPECBATCH_LEASE_SEC": "3",
            "SPECBATCH_SWEEP_INTERVAL_SEC": "0.5",
        }
        self.store = make_store(Settings(workspace=str(home / "workspace")))
        self.job_id = ""

    def submit(self) -> None:
        report = command("submit-job", spec_of(self.home), environment=self.environment,
                         cwd=self.home)  # fmt: skip
        self.job_id = report["job"]

    @contextmanager
    def worker(self, *arguments: str, name: str = "") -> Iterator[WorkerProcess]:
        with worker(*arguments, environment=self.environment, cwd=self.home, name=name) as one:
            yield one

    def ingest(self) -> None:
        """All groups are in the store, and their messages in the broker."""
        with self.worker("ingest") as one:
            wait_until(
                "the input is read",
                lambda: self.store.get_job(self.job_id).stage is Stage.RUN,
                [one],
            )

    def finish(self, one: WorkerProcess) -> None:
        wait_until("the job's end", lambda: self.store.get_job(self.job_id).state.is_final, [one])
        assert self.store.get_job(self.job_id).state == "done", one.text()[-3000:]


@contextmanager
def site_over(broker_url: str, home: Path) -> Iterator[Site]:
    site = Site(broker_url, home)
    try:
        yield site
    finally:
        site.store.close()


def survive(
    site: Site, forget: Callable[[], None], restart: Callable[[], None], expected: Outcome
) -> str:
    """The job, with a broker that loses messages, and then dies while groups are held; the log."""
    site.submit()
    site.ingest()
    forget()
    restart()
    with site.worker("record"), site.worker("verify", *OF_MODEL) as one:
        wait_until(
            "a group is done",
            lambda: site.store.progress(site.job_id).groups_done,
            [one],
        )
        one.freeze()
        restart()
        one.thaw()
        site.finish(one)
        assert outcome(site.store, site.job_id) == expected
        return one.end()


def test_a_job_survives_a_redis_that_forgets_everything_and_dies(
    own_redis: PrivateRedis, undisturbed: Outcome, tmp_path: Path
) -> None:
    def forget() -> None:
        assert own_redis.talk("FLUSHALL") == "+OK"

    def restart() -> None:
        own_redis.kill()
        own_redis.restart()

    with site_over(own_redis.url, tmp_path) as site:
        survive(site, forget, restart, undisturbed)


def test_a_job_survives_a_rabbitmq_that_forgets_everything_and_dies(
    own_rabbit: PrivateRabbit, undisturbed: Outcome, tmp_path: Path
) -> None:
    url = own_rabbit.create_vhost()
    vhost = url.rpartition("/")[2]
    queue = queue_for(Stage.VERIFY, str(demo.VERIFIER))

    def forget() -> None:
        own_rabbit.control("list_queues", "-p", vhost, "name", "type", "arguments")
        shown = own_rabbit.log_tail(20_000)
        [line] = [line for line in shown.splitlines() if line.startswith(queue)]
        assert "quorum" in line
        assert "x-delivery-limit" in line
        assert "celery_delayed" not in shown
        own_rabbit.control("purge_queue", "-p", vhost, queue)

    def restart() -> None:
        own_rabbit.kill()
        own_rabbit.restart()

    with site_over(url, tmp_path) as site:
        survive(site, forget, restart, undisturbed)


class ImpatientRabbit(PrivateRabbit):
    """It takes a message for lost that is not acknowledged within a second."""

    def prepare(self) -> None:
        super().prepare()
        settings = "{consumer_timeout, 1000}, {channel_tick_interval, 250}"
        (self.folder / "impatient.config").write_text(f"[{{rabbit, [{settings}]}}].\n")

    def environment(self) -> dict[str, str]:
        path = str(self.folder / "impatient.config")
        return super().environment() | {"RABBITMQ_ADVANCED_CONFIG_FILE": path}


@pytest.mark.integration
def test_a_group_may_take_longer_than_rabbitmq_waits(undisturbed: Outcome, tmp_path: Path) -> None:
    """Its message comes twice, and the worker that was cut off connects again.

    The worker is frozen before there is a message: RabbitMQ sends to it all the same, and so it
    certainly holds one.
    """
    with ImpatientRabbit() as rabbit, site_over(rabbit.create_vhost(), tmp_path) as site:
        site.submit()
        with site.worker("record"), site.worker("verify", *OF_MODEL) as one:
            wait_until("it listens", lambda: "ready" in one.text(), [one])
            one.freeze()
            site.ingest()
            wait_until("it is cut off", lambda: "timed out" in rabbit.log_tail(20_000))
            one.thaw()
            site.finish(one)
            assert outcome(site.store, site.job_id) == undisturbed
            wait_until("it is back", lambda: "PRECONDITION_FAILED" in one.text(), [one])


def garbage(kind: str) -> bytes:
    """What somebody with the broker's password might put into a queue."""
    good = {"job_id": "0" * 21, "stage": "verify", "group_index": 0}
    head = {"task": "specbatch.work", "id": "x", "lang": "py"}

    def envelope(body: object, **changes: Any) -> bytes:
        message = {
            "body": json.dumps(body),
            "content-type": "application/json",
            "content-encoding": "utf-8",
            "headers": head,
            "properties": {
                "delivery_info": {"exchange": "", "routing_key": "ingest"},
                "delivery_tag": os.urandom(8).hex(),
            },
        }
        return json.dumps(message | changes).encode()

    return {
        "not JSON": b"\x00\xff{",
        "not a message": b"[1, 2]",
        "no headers": envelope([[], good, {}], headers=[1]),
        "no properties": envelope([[], good, {}], properties=None),
        "pickled": envelope("x", **{"content-type": "application/x-python-serialize"}),
        "too large": envelope([[], good | {"job_id": "0" * 10_000}, {}]),
        "another task": envelope([[], {}, {}], headers=head | {"task": "celery.map"}),
        "more fields": envelope([[], good | {"path": "/etc/passwd"}, {}]),
        "a chain": envelope([[], good, {"chain": [{"task": "specbatch.work"}]}]),
        "compressed": envelope("x", headers=head | {"compression": "zlib"}),
    }[kind]


KINDS = [
    "not JSON", "not a message", "no headers", "no properties", "pickled", "too large",
    "another task", "more fields", "a chain", "compressed",
]  # fmt: skip


def test_a_worker_outlives_whatever_is_put_into_its_queue(
    redis_url: str, undisturbed: Outcome, tmp_path: Path
) -> None:
    client = redis.Redis.from_url(redis_url)
    with site_over(redis_url, tmp_path) as site, site.worker("all", *OF_MODEL) as one:
        wait_until("it listens", lambda: "ready" in one.text(), [one])
        for kind in KINDS:
            client.lpush("ingest", garbage(kind))
            wait_until(f"{kind}: it is taken", lambda: not client.llen("ingest"), [one])
        site.submit()
        site.finish(one)
        assert outcome(site.store, site.job_id) == undisturbed
        said = one.end()
    client.close()
    for words in (
        "it has ", "it names no task of this program", "wrong fields: path",
        "it carries a chain, group or chord",
    ):  # fmt: skip
        assert f"a message is refused: {words}" in said
    assert "/etc/passwd" not in said
