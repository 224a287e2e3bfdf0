"""How often a group troubles the store, from planning to commit: the broker only notifies, so every
group's claims, advances and commits are what bounds the number of workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import event

from specbatch.jobs.chaos import stand_in_model
from specbatch.jobs.chaos.stand_in import StandInEngine, StandInHost
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.policy.breaker import Lessons
from specbatch.pipeline.runtime.client import Client
from specbatch.pipeline.runtime.device_time import Timekeeper
from specbatch.pipeline.runtime.leases import LeaseKeeper
from specbatch.pipeline.stages.dispatch import run_stage
from specbatch.schemas.records import DueWork, JobState
from specbatch.schemas.spec import load_spec
from specbatch.schemas.speculation import AcceptanceCount, Decision, DecisionAction
from specbatch.schemas.timekeeping import Device
from support.databases import migrated
from support.stage_context import stage_context

pytestmark = pytest.mark.pipeline  # many runs of a whole job

MOST_OPERATIONS = 12  # transactions of a group that is drafted for, and teaches all it can
PLAIN_OPERATIONS = 7  # of one that is not drafted for
ROWS = 4  # of a group
FEW, MANY = 4, 36  # groups


class Counted:
    """Transactions and statements of one store from here on."""

    def __init__(self, store: SqlStore) -> None:
        self.transactions = self.statements = 0
        event.listen(store._db._reader, "begin", self._began)
        event.listen(store._db._reader, "before_cursor_execute", self._sent)

    def _began(self, _connection: Any) -> None:
        self.transactions += 1

    def _sent(self, _conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        self.statements += not statement.startswith("BEGIN")


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlStore]:
    if request.param == "sqlite":
        url = migrated(tmp_path / "store.db")
    else:
        url = request.getfixturevalue("postgres_url")
    opened = open_store(url)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def _teaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group teaches something about several sources and tags, and comes with a decision."""
    counts = [
        AcceptanceCount(source, tag, 1.0, 2.0)
        for source in ("block", "ngram", "history")
        for tag in (None, "a", "b")
    ]
    decision = Decision(1.0, DecisionAction.ON, "*", "it pays")
    lessons = Lessons(tuple(counts), (decision,))
    monkeypatch.setattr(StandInEngine, "lessons", lambda _self, _job: lessons)


def run_job(store: SqlStore, folder: Path, groups: int, pregenerate: bool) -> Counted:
    """The whole path in this thread; what it asked of the store."""
    folder.mkdir()
    ref = str(stand_in_model.write_model(folder / "model"))
    prompts = [f"row {i}" for i in range(groups * ROWS)]
    pq.write_table(pa.table({"prompt": prompts}), folder / "in.parquet")
    messages: deque[DueWork] = deque()
    hosts = [StandInHost(inspect_model(ref)) for _ in range(2)]
    lease_keeper = LeaseKeeper(store, lease_sec=600.0)
    device = Device("cpu", "local", "reserved", 1_000_000)
    timekeeper = Timekeeper(store, "me", device, hosts)
    context = stage_context(
        store,
        lease_keeper,
        messages.append,
        lease_sec=600.0,
        proposing=hosts[0],
        verifying=hosts[1],
        timing=timekeeper,
    )
    spec = {
        "name": folder.name,
        "input": {"uri": str(folder / "in.parquet")},
        "output": {"uri": str(folder / "out")},
        "verifier": ref,
        "proposer": ref,
        "group_size": ROWS,
        "sampling": {"max_tokens": 8},
        "speculation": {"pregenerate": pregenerate, "history_tokens": 0},
    }
    job, _ = Client(store, messages.append, str(folder / "work")).submit(load_spec(spec))
    counted = Counted(store)
    try:
        while messages:
            message = messages.popleft()
            run_stage(context, message.stage, message.job_id, message.group_index)
    finally:
        lease_keeper.close()
        for host in hosts:
            host.close()
    timekeeper.close()
    done = store.get_job(job.job_id)
    assert done.state is JobState.DONE, done.error
    return counted


@pytest.mark.parametrize(
    ("pregenerate", "most"), [(False, PLAIN_OPERATIONS), (True, MOST_OPERATIONS)]
)
def test_a_group_takes_few_transactions(
    store: SqlStore, tmp_path: Path, pregenerate: bool, most: int
) -> None:
    few = run_job(store, tmp_path / "few", FEW, pregenerate)
    transactions, statements = few.transactions, few.statements
    many = run_job(store, tmp_path / "many", MANY, pregenerate)
    more = MANY - FEW
    assert (many.transactions - transactions) / more <= most
    # On the wire each transaction is its statements, a BEGIN and a COMMIT. The log's entry, the
    # attempt's time, what else it used, acceptance by day, its tenant's spending and, of an attempt
    # on a device, what its tenant is charged are statements of transactions that there are anyway.
    assert (many.statements - statements) / more <= 2 * most + (7 if pregenerate else 6)


def test_a_jobs_spec_is_read_once_and_not_for_every_group(
    store: SqlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    get_job = store.get_job

    def counting(job_id: str) -> Any:
        asked.append(job_id)
        return get_job(job_id)

    monkeypatch.setattr(store, "get_job", counting)
    run_job(store, tmp_path / "job", MANY, pregenerate=False)
    # Ingest reads it before and after, the groups once, publishing once, this test at the end.
    assert len(asked) <= 6
