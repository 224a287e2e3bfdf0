"""A heartbeat tells what a worker serves, and never waits for a model's files to be digested."""

from __future__ import annotations

import threading
from pathlib import Path

from specbatch.jobs.chaos import stand_in_model
from specbatch.jobs.chaos.stand_in import StandInHost
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.runtime.device_time import Timekeeper
from specbatch.pipeline.runtime.leases import LeaseKeeper
from specbatch.pipeline.runtime.presence import ServedModels
from specbatch.pipeline.runtime.work_stealing import WorkStealer
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.timekeeping import Device
from support.databases import sqlite_store

LONG_SEC = 60.0


class Slow:
    """Finds out what is served once it may."""

    def __init__(self, folder: Path) -> None:
        model = str(stand_in_model.write_model(folder / "model"))
        self.host = StandInHost(inspect_model(model))
        self.may = threading.Event()
        self.begun = threading.Semaphore(0)
        self.threads: list[threading.Thread] = []

    def __call__(self) -> Serves:
        self.threads.append(threading.current_thread())
        self.begun.release()
        assert self.may.wait(LONG_SEC)
        return self.host.serves()


def test_a_heartbeat_goes_on_while_files_are_digested(tmp_path: Path) -> None:
    slow, store = Slow(tmp_path), sqlite_store()
    lease_keeper = LeaseKeeper(store, LONG_SEC)
    announced = ServedModels(slow, wait_sec=0.0)
    timekeeper = Timekeeper(store, "w", Device("cpu", "local", "reserved", 200_000), [], announced)
    timekeeper.beat()
    timekeeper.beat()
    assert [one.serves for one in store.sessions()] == [None]
    assert len(slow.threads) == 1, "one finds out, however often it is asked"
    assert slow.threads[0] is not threading.current_thread()
    assert not WorkStealer(store, lease_keeper, "m", "w", LONG_SEC, announced).ask()
    slow.may.set()
    slow.threads[0].join()
    timekeeper.beat()
    assert [one.serves for one in store.sessions()] == [slow.host.serves()]
    lease_keeper.close()
    slow.host.close()


def test_what_was_found_last_is_told_while_it_is_found_out_anew(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    slow.may.set()
    announced = ServedModels(slow, LONG_SEC)
    first = announced()
    assert first == slow.host.serves()
    assert slow.begun.acquire(timeout=LONG_SEC)
    slow.may.clear()
    heartbeat = threading.Thread(target=announced)
    heartbeat.start()
    assert slow.begun.acquire(timeout=LONG_SEC)
    assert announced() == first
    assert len(slow.threads) == 2
    slow.may.set()
    heartbeat.join()
    slow.host.close()


def test_an_error_is_tried_again(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    slow.may.set()
    answers = [slow.host.serves()]

    def find() -> Serves:
        if len(answers) == 1:
            answers.append(answers[0])
            raise OSError("no answer")
        return answers[0]

    announced = ServedModels(find, LONG_SEC)
    assert announced() is None
    assert announced() == answers[0]
    slow.host.close()
