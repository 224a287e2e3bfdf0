"""Workers of a tenant with a budget are killed at any statement or commit: nothing is overspent,
what is booked is what is recorded, and no reservation is left over."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator

import pytest
from contracts.test_budgets import ROWS, account, ingest, limit
from ledger.builders import ROW_BOUND

from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.budgets import Period
from specbatch.schemas.records import Stage
from support import forks
from support.databases import new_database

GROUPS, LIMIT = 12, 20 * ROWS * ROW_BOUND  # of two jobs, 24 groups in all
# Works until nothing can be claimed, or kills itself before its nth statement or commit.
WORKER = """
import os, random, signal, sys
from dataclasses import replace
from sqlalchemy import Engine, event
from contracts.test_budgets import account, claim, records
from ledger.builders import NO_TIME, RESULTS
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.budgets import Period
from specbatch.schemas.errors import FencedError
from specbatch.schemas.records import Stage
url, seed, left, limit = sys.argv[1], *map(int, sys.argv[2:])
draw, store = random.Random(seed), SqlStore(url)

def count(*_):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def check():
    of = account(store)
    assert of.spent[Period.TOTAL].tokens + of.reserved_tokens <= limit, of

def record(job_id, index):
    work = store.claim_group(job_id, index, Stage.RECORD, f"w{seed}", 0.2)
    if work is None:
        return
    tokens = draw.randrange(1, 12)
    done = [
        replace(one, token_ids=(7,) * tokens, origins=(0,) * tokens, logprobs=(0.0,) * tokens)
        for one in records(work)
    ]
    store.commit_group(work.lease, done, NO_TIME, {})

event.listen(Engine, "before_cursor_execute", count)
event.listen(Engine, "commit", count)
while True:
    work = claim(store, f"w{seed}")
    check()
    try:
        if work is not None:
            store.advance(work.lease, Stage.RECORD, RESULTS, NO_TIME)
            check()
            record(work.lease.job_id, work.lease.group_index)
        else:
            waiting = [due for job in store.list_jobs() for due in store.due(job_id=job.job_id)]
            waiting = [due for due in waiting if due.stage is Stage.RECORD]
            if not waiting:
                break
            record(waiting[0].job_id, waiting[0].group_index)
    except FencedError:
        pass
    check()
"""


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "sqlite":
        return new_database()
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    opened = SqlStore(url)
    yield opened
    opened.close()


def recorded_tokens(store: SqlStore) -> int:
    records = [one for job in store.list_jobs() for one in store.completions(job.job_id)]
    return sum(one.prompt_tokens + len(one.token_ids) for one in records)


def balances(store: SqlStore) -> bool:
    of = account(store)
    spent = of.spent[Period.TOTAL].tokens
    return spent == recorded_tokens(store) and spent + of.reserved_tokens <= LIMIT


FIFTY = pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(7200)])


@pytest.mark.parametrize("kills", [2, FIFTY])
def test_the_books_balance_however_often_workers_are_killed(
    url: str, store: SqlStore, kills: int
) -> None:
    draw = random.Random(kills)
    for job_id in ("job-1", "job-2"):
        ingest(store, job_id, groups=GROUPS)
    limit(store, LIMIT)
    seed = 0
    for _ in range(kills // 2):
        numbers = [(seed + i, draw.randrange(4, 120), LIMIT) for i in range(2)]
        workers = forks.together([("-c", WORKER, url, *map(str, each)) for each in numbers])
        codes = {worker.returncode for worker in workers}
        assert codes <= {-signal.SIGKILL, 0}, [worker.stderr for worker in workers]
        assert balances(store)
        seed += 2
        free_all(store)
    [last] = forks.together([("-c", WORKER, url, str(seed), "-1", str(LIMIT))])
    assert last.returncode == 0, last.stderr
    free_all(store)
    store.stop_overdue()
    store.close_over()
    assert account(store).reserved_tokens == 0
    assert balances(store)
    assert {job.stage for job in store.list_jobs()} == {Stage.PUBLISH}
    assert recorded_tokens(store) > 0


def free_all(store: SqlStore) -> None:
    """The leases of the killed run out at once."""
    for job in store.list_jobs():
        for owner in store.holders(job.job_id):
            store.expire_leases(job.job_id, owner)
