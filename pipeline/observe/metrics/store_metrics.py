"""Figures of the whole store as metrics, read when somebody asks and kept for a moment.

A scrape never waits long for the store. While the store is slow, the last figures are shown for a
while; while it is out of reach, there are none.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import GaugeMetricFamily

from specbatch.pipeline.observe.metrics import metric_names as names
from specbatch.pipeline.observe.metrics.meter import PRIVATE
from specbatch.pipeline.observe.metrics.metric_names import Labels, Metric
from specbatch.schemas.backlog import Backlog
from specbatch.schemas.figures import StoreFigures
from specbatch.schemas.numeric_class import UNKNOWN
from specbatch.schemas.records import JobState, Stage
from specbatch.schemas.visible import visible

log = logging.getLogger(__name__)

FRESH_SEC = 5.0  # figures younger than this are not read again
PATIENCE_SEC = 3.0  # a scrape waits no longer for them
KEPT_SEC = 60.0  # the last figures are shown for so long while reading takes longer


class StoreMetrics:
    """Reads in one thread, however many ask. Thread-safe."""

    def __init__(
        self,
        read: Callable[[], StoreFigures],
        fresh_sec: float = FRESH_SEC,
        patience_sec: float = PATIENCE_SEC,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` may raise whatever a store raises."""
        self._read = read
        self._fresh_sec = fresh_sec
        self._patience_sec = patience_sec
        self._clock = clock
        self._lock = threading.Lock()  # of what follows
        self._figures: StoreFigures | None = None
        self._at = 0.0  # when they arrived
        self._reading: threading.Thread | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The families of a scrape."""
        figures = self._fresh()
        is_up: dict[Labels, float] = {(): float(figures is not None)}
        yield _family(names.STORE_UP, is_up)
        for metric, values in store_values(figures).items():
            yield _family(metric, values)

    def _fresh(self) -> StoreFigures | None:
        with self._lock:
            if figures := self._younger_than(self._fresh_sec):
                return figures
            if self._reading is None:
                self._reading = threading.Thread(target=self._refresh, name="figures", daemon=True)
                self._reading.start()
            reading = self._reading
        reading.join(self._patience_sec)
        with self._lock:
            return self._younger_than(KEPT_SEC)

    def _younger_than(self, sec: float) -> StoreFigures | None:
        return self._figures if self._clock() - self._at < sec else None

    def _refresh(self) -> None:
        figures = None
        try:
            figures = self._read()
        except Exception as error:  # the scrape says that it is not up; the worker continues
            log.warning("the store's figures cannot be read: %s", error)
        with self._lock:
            self._figures, self._at, self._reading = figures, self._clock(), None


def _family(metric: Metric, values: dict[Labels, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(list(map(visible, labels)), value)
    return family


def _waiting_jobs(backlog: Backlog) -> dict[Labels, float]:
    """By numeric class that a job has pinned; the sweeper ends silent workers."""
    workers = backlog.alive(math.inf).verifying()
    found: dict[Labels, float] = {}
    for job in backlog.pinned:
        if Stage.VERIFY in job.stages:
            label = (job.numeric_class or UNKNOWN,)
            found[label] = found.get(label, 0.0) + (job.waits_to_verify(workers) is not None)
    return found


def _lacking_jobs(backlog: Backlog) -> dict[Labels, float]:
    """By the stage that no worker serves for them."""
    alive = backlog.alive(math.inf)
    found: dict[Labels, float] = {(stage,): 0.0 for stage in names.STAGES}
    for job in backlog.pinned:
        for stage in job.lacking(alive):
            found[(stage.value,)] += 1.0
    return found


def store_values(figures: StoreFigures | None) -> dict[Metric, dict[Labels, float]]:
    """By metric. None: the store is out of reach, so no metric has a value."""
    if figures is None:
        return {
            metric: {}
            for metric in names.METRICS
            if metric.scope is names.Scope.STORE and metric is not names.STORE_UP
        }
    backlog = figures.backlog
    units = {stage: backlog.at_stage(Stage(stage)) for stage in names.STAGES}
    workers = Counter(worker.device.kind for worker in backlog.workers)
    same = figures.audited.audited - figures.audited.differing
    return {
        names.GROUPS: {
            (stage, state): float(getattr(of, state))
            for stage, of in units.items()
            for state in names.UNIT_STATES
        },
        names.OLDEST_READY: {(stage,): of.oldest_ready_sec or 0.0 for stage, of in units.items()},
        names.STUCK_LEASES: {(): float(sum(of.expired for of in units.values()))},
        names.JOBS: {
            (state,): float(backlog.jobs.get(JobState(state), 0)) for state in names.LIVE_STATES
        },
        names.ROWS_FAILED: {(): float(backlog.rows_failed)},
        names.WORKERS: {(kind,): float(count) for kind, count in sorted(workers.items())},
        names.WORKERS_WITHOUT_BROKER: {
            (): float(sum(one.trouble is not None for one in backlog.processes)),
        },
        names.JOBS_WITHOUT_WORKER: _waiting_jobs(backlog),
        names.JOBS_WAITING: _lacking_jobs(backlog),
        names.JOBS_OVER_BUDGET: {
            (period,): float(sum(one.period == period for one in backlog.over_budget))
            for period in names.PERIODS
        },
        names.AUDITED: {
            ("same",): float(same),
            ("different",): float(figures.audited.differing),
        },
        names.DRAFT_SWITCHES: {
            (kind,): float(count)
            for kind, count in sorted({"everything": 0, **figures.draft_switches}.items())
        },
        names.SCHEDULE_SUCCESS: {
            (name,): of.last_success_at
            for name, of in sorted(figures.schedules.items())
            if of.last_success_at is not None
        },
        names.SCHEDULE_MISSED: {
            (name,): float(of.missed) for name, of in sorted(figures.schedules.items())
        },
        names.SCHEDULE_FAILED: {
            (name, outcome): float(count)
            for name, of in sorted(figures.schedules.items())
            for outcome, count in (
                *(("failed", of.failed), ("partial", of.partial), ("late", of.late)),
            )
        },
        names.SCHEDULE_DURATION: {
            (name,): of.duration_sec
            for name, of in sorted(figures.schedules.items())
            if of.duration_sec is not None
        },
        names.JOBS_AT_RISK: {
            (name or PRIVATE,): float(count) for name, count in figures.at_risk.items()
        },
        names.SLOW_FALL: {
            (name or PRIVATE, proposer): float(falls)
            for (name, proposer), falls in figures.slow_falls.items()
        },
        names.SPEND: {(of,): usd for of, usd in figures.spend.items()},
    }
