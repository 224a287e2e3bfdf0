"""What commands say of a job's numeric class, and how a job is moved to another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contracts.shorthand import F32, TORCH, ingest, serving
from ledger.builders import JOB, LEASE_SEC

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.provenance import Ticks
from specbatch.schemas.records import Stage
from specbatch.schemas.timekeeping import Attempt, Device, NewSession, SessionTime

WAITS = f"waits for a worker of numeric class {F32}; alive: {TORCH}"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The store of the commands, with a job of two groups."""
    url = f"sqlite:///{tmp_path / 'classes.db'}"
    monkeypatch.setenv("SPECBATCH_DATABASE_URL", url)
    opened = open_store(url)
    ingest(opened)
    yield opened
    opened.close()


def announce(store: Store, owner: str, name: str, **facts: str) -> None:
    told = Serves.of("big", dict(serving(name).classes), {name: facts})
    store.begin_session(NewSession(owner, owner, Device("cpu", "", "", 1), 0, told))


def begin(store: Store) -> None:
    """One worker of `F32` has begun, and is gone; one of `TORCH` is there."""
    announce(store, "gone", F32, engine="exact", arithmetic="f32")
    work = store.claim_next(Stage.VERIFY, "big", "gone", LEASE_SEC, serving(F32))
    assert work is not None
    store.end_session(SessionTime("gone", 2), {Attempt.of(work.lease): Ticks(verify=1)})
    announce(store, "there", TORCH)


def test_a_job_that_has_begun_nothing_has_no_class(cli: Any, store: Store) -> None:
    assert store.get_job(JOB).numeric_class is None
    assert "numeric class: chosen when its first group is verified" in cli("show", JOB).out
    told = cli("show", JOB, "--json").json
    assert told["numeric_class"] is None
    assert told["waits_for"] == "waits for a worker with model `big`; alive: none"


def test_show_spells_the_class_out_and_says_what_the_job_waits_for(cli: Any, store: Store) -> None:
    begin(store)
    said = cli("show", JOB).out
    assert f"numeric class: {F32}\n    engine exact, arithmetic f32\n{WAITS}" in said
    assert f"specbatch retry {JOB} --numeric-class NAME" in said
    told = cli("show", JOB, "--json").json
    assert (told["numeric_class"], told["waits_for"]) == (F32, WAITS)


def test_top_says_what_jobs_wait_for(cli: Any, store: Store) -> None:
    begin(store)
    assert f"{JOB[:12]} {WAITS}" in cli("top", "--once").out
    [job] = cli("top", "--json").json["jobs"]
    assert (job["numeric_class"], job["waits"]) == (F32, WAITS)
    [worker] = cli("top", "--json").json["workers"]
    assert worker["numeric_classes"] == [TORCH]


def test_a_job_that_goes_on_is_moved(cli: Any, store: Store) -> None:
    begin(store)
    assert cli("retry", JOB, "--numeric-class", TORCH, "--json").json["units"] == 2
    assert store.get_job(JOB).numeric_class == TORCH
    assert cli("show", JOB, "--json").json["waits_for"] is None


def test_what_is_no_class_is_refused_in_one_sentence(cli: Any, store: Store) -> None:
    begin(store)
    called = cli("retry", JOB, "--numeric-class", "fast")
    assert called.code == 2
    assert "is not a numeric class" in called.err
    assert store.get_job(JOB).numeric_class == F32
