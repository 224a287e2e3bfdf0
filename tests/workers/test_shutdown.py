"""A worker that is asked to end: tasks have a while, then their groups are given back."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from celery.signals import worker_shutting_down
from celery.worker import state

from specbatch.pipeline.runtime.outage import Outage
from specbatch.workers.lifecycle import PATIENCE_SEC
from specbatch.workers.shutdown import GracefulShutdown, LossNotice
from support import demo
from support.workers import command, wait_until, worker

pytestmark = pytest.mark.pipeline  # starts processes


class Engines:
    """Tells when it is stopped."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def stop(self) -> None:
        self.stopped.set()


def a_worker(*engines: Engines) -> Any:
    return SimpleNamespace(engines=engines, outage=Outage())


def test_all_engines_stop_when_the_time_of_tasks_is_over() -> None:
    """None is waited for before another one is stopped, nor is any at all: one may be loading."""
    several = [Engines(), Engines()]
    with GracefulShutdown(a_worker(*several), patience_sec=0.0):
        assert not any(engines.stopped.is_set() for engines in several)
        worker_shutting_down.send(sender="worker", sig="SIGTERM", how="Warm", exitcode=0)
        assert all(engines.stopped.wait(30) for engines in several)


def test_engines_stay_open_for_tasks_that_end_in_time_and_nobody_waits_for_the_rest() -> None:
    engines = Engines()
    with GracefulShutdown(a_worker(engines), patience_sec=3600.0):
        worker_shutting_down.send(sender="worker", sig="SIGTERM", how="Warm", exitcode=0)
        worker_shutting_down.send(sender="worker", sig="SIGTERM", how="Warm", exitcode=0)
    assert not engines.stopped.is_set()
    worker_shutting_down.send(sender="another", sig="SIGTERM", how="Warm", exitcode=0)
    assert not engines.stopped.is_set()


def test_after_a_notice_of_loss_nobody_waits_for_tasks(tmp_path: Path) -> None:
    engines, notice = Engines(), tmp_path / "notice"
    try:
        with (
            GracefulShutdown(a_worker(engines), patience_sec=3600.0),
            LossNotice(str(notice), every_sec=0.01),
        ):
            notice.touch()
            assert engines.stopped.wait(30)
        assert state.should_stop == 0, "as after SIGTERM"
    finally:
        state.should_stop = None


def test_without_a_notice_nothing_ends(tmp_path: Path) -> None:
    engines = Engines()
    for path in ("", str(tmp_path / "notice")):
        with GracefulShutdown(a_worker(engines), patience_sec=3600.0), LossNotice(path):
            pass
    assert not engines.stopped.is_set()
    assert state.should_stop is None


@pytest.mark.long
@pytest.mark.parametrize("by_notice", [False, True])
def test_a_worker_in_the_middle_of_long_groups_ends_within_an_orchestrator_s_grace_period(
    tmp_path: Path, redis_url: str, postgres_url: str, by_notice: bool
) -> None:
    notice = tmp_path / "notice"
    environment = {
        "SPECBATCH_LOSS_NOTICE_FILE": str(notice) if by_notice else "",
        "SPECBATCH_BROKER_URL": redis_url,
        "SPECBATCH_DATABASE_URL": postgres_url,
        "SPECBATCH_WORKSPACE": str(tmp_path / "workspace"),
    }

    def count(condition: str) -> int:
        with psycopg.connect(postgres_url) as store:
            (found,) = store.execute(f"SELECT count(*) FROM {condition}".encode()).fetchone() or (
                0,
            )
        return int(found)

    flags = [
        *("--n", "16", "--max-tokens", "400", "--ignore-eos", "--temperature", "0.7"),
        *("--group-size", "16", "--verifier", str(demo.VERIFIER)),
    ]
    command(
        "submit-job", "--input", str(demo.PROMPTS), "--output", "out", *flags,
        environment=environment, cwd=tmp_path,
    )  # fmt: skip
    with worker(
        "all", "--verifier", str(demo.VERIFIER), environment=environment, cwd=tmp_path
    ) as one:
        wait_until("groups are held", lambda: count("groups WHERE lease_until > 0") > 3, [one])
        if by_notice:
            notice.touch()
        else:
            one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(PATIENCE_SEC + 45) == 0
        assert ("is about to be taken away" in one.text()) is by_notice
        assert "groups in hand are given back" in one.text()
    assert count("groups WHERE lease_until > 0") == 0
    assert count("groups WHERE stage = 'verify'") > 0
    assert count("worker_sessions WHERE ended_at IS NULL") == 0
