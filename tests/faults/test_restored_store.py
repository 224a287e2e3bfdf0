"""A store that is restored from a copy gives out numbers of attempts again that it gave before.

What was made of them in the meantime is done once more, to the same outputs; and what is late from
before touches nothing that was made since.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from faults.in_process import PLAIN, Shop, armed, back_up, shop

from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.stages import ingest
from specbatch.schemas.crash_points import CrashPoint
from specbatch.schemas.records import Stage


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with shop(tmp_path_factory.mktemp("shop")) as made:
        yield made


@pytest.fixture
def here(shared: Shop) -> Iterator[Shop]:
    """It is every test's; whoever a test hires leaves with it."""
    yield shared
    shared.dismiss_hired()


def at_stage(here: Shop, job_id: str, stage: Stage) -> None:
    """Do what comes before."""
    while here.store.due(job_id=job_id)[0].stage is not stage:
        here.do_next(job_id)


@pytest.mark.parametrize(
    ("stage", "point"),
    [
        (Stage.PROPOSE, CrashPoint.DRAFT_WRITE),
        (Stage.VERIFY, CrashPoint.ARTEFACT_WRITE),
        (Stage.PUBLISH, CrashPoint.UPLOAD),
        (Stage.PUBLISH, CrashPoint.MANIFEST),
    ],
)
def test_who_works_on_from_before_touches_nothing_that_was_made_since(
    here: Shop, tmp_path: Path, stage: Stage, point: CrashPoint
) -> None:
    late, other = here.workers[0], here.hire()
    store, copy = here.folder / "specbatch.db", tmp_path / "copy.db"
    job_id = here.submit(PLAIN)
    at_stage(here, job_id, stage)
    back_up(store, copy)
    met: list[CrashPoint] = []

    def restore(reached: CrashPoint) -> None:
        """Before its file is written, another one makes the same attempt, by its number."""
        if reached is point and not met:
            met.append(reached)
            back_up(copy, store)
            here.do_next(job_id, other)

    with armed(restore):
        here.do_next(job_id, late)
    assert met
    here.drain(job_id, other)
    assert here.report(job_id, restored=True).violations == ()


def test_who_publishes_from_before_and_holds_the_same_lease_again_stops(
    here: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is restored while a publisher reads; what it read lacks what is recorded anew, and
    then another thread of its worker is given the same number."""
    worker = here.workers[0]
    store, copy = here.folder / "specbatch.db", tmp_path / "copy.db"
    job_id = here.submit(PLAIN)
    at_stage(here, job_id, Stage.RECORD)
    back_up(store, copy)
    at_stage(here, job_id, Stage.PUBLISH)
    whole, restored = type(here.store).completions, threading.Event()
    late, again = (
        threading.current_thread(),
        threading.Thread(target=here.drain, args=(job_id,)),
    )

    def completions(self: SqlStore, *arguments: Any, **values: Any) -> Any:
        if threading.current_thread() is late and not restored.is_set():
            restored.set()
            back_up(copy, store)
        yield from whole(self, *arguments, **values)

    def meet(point: CrashPoint) -> None:
        if point is CrashPoint.UPLOAD and again.ident is None:
            again.start()
            again.join()

    monkeypatch.setattr(type(here.store), "completions", completions)
    with armed(meet):
        here.do_next(job_id, worker)
    assert restored.is_set()
    assert here.store.get_job(job_id).state.is_final
    assert here.report(job_id, restored=True).violations == ()


@pytest.mark.parametrize("lacks", [0, 1])
def test_a_reader_of_the_input_does_not_leave_out_what_the_copy_lacks(
    here: Shop, tmp_path: Path, lacks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease is in the copy too, so the store takes what it writes for the next groups."""
    store, copy = here.folder / "specbatch.db", tmp_path / "copy.db"
    method = ("finish_ingest", "add_groups")[lacks]
    add, then = SqlStore.add_groups, getattr(SqlStore, method)
    done: list[str] = []

    def adding(self: SqlStore, *arguments: Any) -> None:
        if "copied" not in done:
            back_up(store, copy)
            done.append("copied")
            add(self, *arguments)
        else:
            ending(self, *arguments) if lacks else add(self, *arguments)

    def ending(self: SqlStore, *arguments: Any) -> None:
        if "restored" not in done:
            back_up(copy, store)
            done.append("restored")
        then(self, *arguments)

    monkeypatch.setattr(ingest, "MOST_TOGETHER", 1)
    monkeypatch.setattr(SqlStore, "add_groups", adding)
    if not lacks:
        monkeypatch.setattr(SqlStore, "finish_ingest", ending)
    job_id = here.submit(PLAIN)
    here.drain(job_id)
    assert done == ["copied", "restored"]
    assert here.report(job_id, restored=True).violations == ()


def test_who_has_the_store_open_sees_the_copy_that_was_put_in_its_place(tmp_path: Path) -> None:
    with shop(tmp_path) as here:
        store, copy = tmp_path / "specbatch.db", tmp_path / "copy.db"
        job_id = here.submit(PLAIN)
        at_stage(here, job_id, Stage.VERIFY)
        back_up(store, copy)
        here.drain(job_id)
        assert here.store.get_job(job_id).state.is_final
        for beside in ("specbatch.db-wal", "specbatch.db-shm"):
            (tmp_path / beside).unlink(missing_ok=True)
        copy.replace(store)
        assert not here.store.get_job(job_id).state.is_final
        here.drain(job_id)
        with closing(sqlite3.connect(store)) as fresh:
            (state,) = fresh.execute("SELECT state FROM jobs WHERE job_id = ?", [job_id]).fetchone()
        assert state == "partial"
        assert here.report(job_id, restored=True).violations == ()
