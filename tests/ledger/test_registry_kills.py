"""A process is killed at each statement of a change to the model registry or to a rollout: all of
it or none."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.registry import DeployScope, NewModel
from specbatch.schemas.rollouts import Observed
from support.databases import new_database

pytestmark = pytest.mark.pipeline  # each starts a process for every statement

# Kills itself before the nth statement that it sends, or before the commit behind them.
KILLED = """
import os, signal, sys
from sqlalchemy import Engine, event
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.registry import DeployScope, NewModel
from specbatch.schemas.rollouts import Observed
url, action, left = sys.argv[1], sys.argv[2], int(sys.argv[3])
def count(*_):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
store = SqlStore(url)
store.models()
event.listen(Engine, "before_cursor_execute", count)
event.listen(Engine, "commit", count)
{
    "add": lambda: store.add_model(NewModel("cc", "docs", "/models/cc")),
    "promote": lambda: store.promote("bb", DeployScope(), "better"),
    "roll back": lambda: store.roll_back(DeployScope(), "worse"),
    "retire": lambda: store.retire("aa"),
    "begin": lambda: store.begin_rollout("dd", DeployScope("acme"), (0.5, 1.0), "trained"),
    "observe": lambda: store.observe_rollout(2, "job", 99, Observed(0.5, True, 1000, 1.0)),
    "settle": lambda: store.settle_rollouts(),
    "stop": lambda: store.stop_rollout(DeployScope(tag="news"), "found a fault"),
}[action]()
"""
MOST_STATEMENTS = 24


@pytest.fixture
def url() -> Iterator[str]:
    """Three models. The second drafts for everything, in the place of the first; the third is tried
    for two tags: for one it is better, for the other not yet."""
    url = new_database()
    store = SqlStore(url)
    for name in ("aa", "bb"):
        store.add_model(NewModel(name, "docs", f"/models/{name}"))
        store.promote(name, DeployScope(), "next")
    store.add_model(NewModel("dd", "docs", "/models/dd"))
    for tag, groups in (("news", 60), ("code", 5)):
        rollout = store.begin_rollout("dd", DeployScope(tag=tag), (0.5, 1.0), "trained")
        for i in range(groups):
            seen = Observed(0.5, i % 2 == 0, 1000 if i % 2 == 0 else 10, 1.0)
            store.observe_rollout(rollout.number, "job", i, seen)
    yield url
    store.close()


def state(url: str) -> tuple[object, ...]:
    store = SqlStore(url)
    try:
        models = [(m.label, m.fingerprint, m.retired_at is not None) for m in store.models()]
        history = [(d.fingerprint, d.ended_at is None) for d in store.deployments(history=True)]
        rollouts = [
            (r.number, r.outcome, r.better, r.ended_at is None, len(store.rollout_groups(r.number)))
            for r in store.rollouts(history=True)
        ]
        return (*models, *history, *rollouts)
    finally:
        store.close()


@pytest.mark.parametrize(
    "action", ["add", "promote", "roll back", "retire", "begin", "observe", "settle", "stop"]
)
def test_a_change_that_is_killed_is_whole_or_not_there(url: str, action: str) -> None:
    before, killed = state(url), 0
    for statement in range(1, MOST_STATEMENTS):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, url, action, str(statement)], check=False, timeout=120
        )
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        assert state(url) == before
        killed += 1
    else:
        pytest.fail("the change never ended")
    assert killed >= 2, "at its statement and at its commit"
    assert state(url) != before
