"""The endpoint: what is wrong is one sentence, and a store that is away holds nothing up."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from specbatch.pipeline.bootstrap import make_exposure
from specbatch.pipeline.observe.metrics import metric_names as names
from specbatch.pipeline.observe.metrics.endpoint import Exposure
from specbatch.pipeline.observe.metrics.metric_names import METRICS
from specbatch.pipeline.observe.metrics.store_metrics import (
    FRESH_SEC,
    KEPT_SEC,
    StoreMetrics,
    store_values,
)
from specbatch.schemas.backlog import Backlog, StageBacklog, WorkerNow
from specbatch.schemas.errors import MissingExtraError, StoreError, UsageError
from specbatch.schemas.figures import ScheduleRuns, StoreFigures
from specbatch.schemas.records import JobState, Stage
from specbatch.schemas.settings import Settings
from specbatch.schemas.timekeeping import Device
from support.scraping import Scrape, scrape
from support.servers import free_port

HERE = "127.0.0.1"


def test_nothing_is_counted_or_served_unless_a_port_is_set() -> None:
    assert make_exposure(Settings(workspace="unused")) is None


def test_a_port_in_use_is_told_in_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind((HERE, 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = Settings(workspace="unused", metrics_port=port, metrics_address=HERE)
        told = rf"^metrics cannot be served on {HERE}:{port} \(Address already in use\): set"
        with pytest.raises(UsageError, match=told) as met:
            make_exposure(settings)
        assert "\n" not in str(met.value)
    exposure = make_exposure(settings)  # the failed attempt does not hinder this one
    assert exposure is not None
    assert scrape(port).total("specbatch_build_info") == 1
    exposure.close()


def test_without_the_extra_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbatch.pipeline.bootstrap.find_spec", lambda _: None)
    settings = Settings(workspace="unused", metrics_port=free_port())
    with pytest.raises(MissingExtraError, match=r"pip install 'specbatch\[observe\]'`, or unset"):
        make_exposure(settings)


def test_closing_frees_the_port_and_ends_its_threads() -> None:
    port, before = free_port(), set(threading.enumerate())
    for planned in (False, True):
        settings = Settings(
            workspace="unused", metrics_port=port, metrics_address=HERE, planned_rollout=planned
        )
        exposure = make_exposure(settings)
        assert exposure is not None
        assert scrape(port).total("specbatch_planned_rollout") == planned
        exposure.close()
        assert set(threading.enumerate()) == before
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_health_is_what_is_so_when_it_is_asked() -> None:
    """From the first moment on: a worker that has not connected yet is not ready."""
    port, trouble = free_port(), ["not yet"]
    settings = Settings(workspace="unused", metrics_port=port, metrics_address=HERE)
    exposure = make_exposure(settings, lambda: trouble[0] or None)
    assert exposure is not None
    for why, status in (("not yet", 503), ("", 200), ("gone", 503), ("", 200)):
        trouble[0] = why
        assert health(port) == status
        assert scrape(port).total("specbatch_broker_trouble") == (status == 503)
    exposure.close()


def health(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://{HERE}:{port}/healthz", timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def served(*sources: StoreMetrics) -> tuple[Exposure, int]:
    port = free_port()
    settings = Settings(workspace="unused", metrics_port=port, metrics_address=HERE)
    endpoint = Exposure(settings, lambda: None)
    for source in sources:
        endpoint._registry.register(source)
    return endpoint, port


_CPU = Device("cpu", "local", "spot", 1)
FIGURES = StoreFigures(
    Backlog(
        at=1_000.0,
        stages=(StageBacklog(Stage.VERIFY, ready=3, leased=2, expired=1, oldest_ready_sec=7.5),),
        jobs={JobState.RUNNING: 2},
        rows_failed=4,
        workers=tuple(WorkerNow(name, name, _CPU, 9.0, 1.0, 8, 4, 2) for name in ("a", "b")),
    )
)


def test_figures_of_the_store_are_read_once_for_many_scrapes() -> None:
    asked, time = [], [100.0]

    def read() -> StoreFigures:
        asked.append(time[0])
        return FIGURES

    endpoint, port = served(StoreMetrics(read, fresh_sec=5.0, clock=lambda: time[0]))
    try:
        for _ in range(3):
            said = scrape(port)
            assert said.total("specbatch_groups", stage="verify", state="ready") == 3
            assert said.total("specbatch_groups") == 5
            assert said.total("specbatch_stuck_leases") == 1
            assert said.total("specbatch_oldest_ready_seconds", stage="verify") == 7.5
            assert said.values_of("specbatch_groups", "stage") == set(names.STAGES)
            assert said.total("specbatch_store_up") == 1
        assert asked == [100.0]
        time[0] += 5.0
        scrape(port)
        assert asked == [100.0, 105.0]
    finally:
        endpoint.close()


def no_figures(said: Scrape) -> bool:
    """The store's families are there, without values."""
    mine = [metric.name for metric in METRICS if metric.scope is names.Scope.STORE]
    missing = [name for name in mine if name not in said.samples]
    assert set(mine) <= set(said.types)
    return missing == [name for name in mine if name != names.STORE_UP.name]


def test_a_store_that_does_not_answer_holds_no_scrape_up() -> None:
    comes_back = threading.Event()

    def read() -> StoreFigures:
        assert comes_back.wait(60)
        return FIGURES

    source = StoreMetrics(read, patience_sec=0.05)
    endpoint, port = served(source)
    try:
        said = scrape(port)
        assert said.total("specbatch_store_up") == 0
        assert no_figures(said)
        assert said.samples["specbatch_sweeps_total"], "its own figures are there"
        comes_back.set()
        reading = source._reading
        if reading is not None:
            reading.join()
        assert scrape(port).total("specbatch_store_up") == 1
    finally:
        endpoint.close()


def test_figures_that_take_long_are_shown_and_kept_for_a_while() -> None:
    asked: list[float] = []
    time, may_come = [100.0], threading.Event()

    def read() -> StoreFigures:
        asked.append(time[0])
        assert may_come.wait(60)
        return FIGURES

    def come() -> None:
        reading = source._reading
        assert reading is not None
        may_come.set()
        reading.join()
        may_come.clear()

    source = StoreMetrics(read, patience_sec=0.01, clock=lambda: time[0])
    endpoint, port = served(source)
    try:
        assert scrape(port).total("specbatch_store_up") == 0, "nothing was ever read"
        time[0] += FRESH_SEC
        come()
        assert scrape(port).total("specbatch_store_up") == 1
        assert asked == [100.0], "they are fresh from when they came"
        time[0] += KEPT_SEC - 1
        said = scrape(port)
        assert said.total("specbatch_store_up") == 1
        assert said.total("specbatch_groups") == 5
        time[0] += 1
        said = scrape(port)
        assert said.total("specbatch_store_up") == 0
        assert no_figures(said)
        come()
        assert scrape(port).total("specbatch_store_up") == 1
        assert len(asked) == 2
    finally:
        may_come.set()
        endpoint.close()


def test_of_a_store_that_refuses_nothing_is_kept() -> None:
    answers, time = [FIGURES], [100.0]

    def read() -> StoreFigures:
        if not answers:
            raise StoreError("the database is out of reach")
        return answers.pop()

    endpoint, port = served(StoreMetrics(read, clock=lambda: time[0]))
    try:
        assert scrape(port).total("specbatch_store_up") == 1
        time[0] += FRESH_SEC
        said = scrape(port)
        assert said.total("specbatch_store_up") == 0
        assert no_figures(said)
    finally:
        endpoint.close()


def test_an_error_of_the_store_is_no_error_of_the_scrape(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def read() -> StoreFigures:
        raise StoreError("the database is out of reach")

    endpoint, port = served(StoreMetrics(read))
    try:
        said = scrape(port)
        assert said.total("specbatch_store_up") == 0
        assert no_figures(said)
        assert "the store's figures cannot be read: the database is out of reach" in caplog.text
    finally:
        endpoint.close()


def test_what_drift_and_spend_found_has_its_series_and_private_jobs_have_no_name() -> None:
    falls: dict[tuple[str | None, str], bool] = {("nightly", "ngram"): True, (None, "ngram"): False}
    told = store_values(replace(FIGURES, slow_falls=falls, spend={"to_date": 8.0, "limit": 30.0}))
    assert told[names.SLOW_FALL] == {("nightly", "ngram"): 1.0, ("private", "ngram"): 0.0}
    assert told[names.SPEND] == {("to_date",): 8.0, ("limit",): 30.0}


def test_runs_and_deadlines_of_jobs_have_their_series() -> None:
    runs = {"nightly": ScheduleRuns(late=2, duration_sec=70.0), "new": ScheduleRuns()}
    told = store_values(replace(FIGURES, schedules=runs, at_risk={"nightly": 1, None: 0}))
    assert told[names.SCHEDULE_FAILED]["nightly", "late"] == 2.0
    assert told[names.SCHEDULE_DURATION] == {("nightly",): 70.0}
    assert told[names.JOBS_AT_RISK] == {("nightly",): 1.0, ("private",): 0.0}


def test_all_figures_of_a_store_have_a_metric_and_the_other_way_round() -> None:
    mine = {m for m in METRICS if m.scope is names.Scope.STORE} - {names.STORE_UP}
    assert set(store_values(FIGURES)) == set(store_values(None)) == mine
