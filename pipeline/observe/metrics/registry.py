"""What a process counts: counters, gauges and histograms of prometheus_client in one registry.

Counting and reading share one lock, so what is counted together is read together. A label whose
values come from outside has a limited number of them in a process; further ones count as `other`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import product

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.metrics_core import Metric as Family

from specbatch.pipeline.observe.metrics.metric_names import METRICS, Kind, Labels, Metric, Scope
from specbatch.schemas.visible import visible

MOST_VALUES = 50
OTHER = "other"
_FROM_OUTSIDE = frozenset({"job", "tag", "proposer", "code"})

Instrument = Counter | Gauge | Histogram
Ask = Callable[[], Mapping[Labels, float]]

disable_created_metrics()  # nobody asked for twice as many series


class Metrics:
    """All metrics of one process, as a collector of Prometheus' client. Thread-safe."""

    def __init__(self, most_values: int = MOST_VALUES) -> None:
        self._lock = threading.RLock()
        self._most_values = most_values
        self._known: dict[str, set[str]] = {}  # values of labels from outside
        self._asked: dict[Metric, Ask] = {}
        self._before: list[Callable[[], None]] = []
        self._registry = CollectorRegistry()
        self._instruments: dict[Metric, Instrument] = {}
        for metric in METRICS:
            if metric.scope is Scope.PROCESS:
                self._instruments[metric] = _instrument(metric, self._registry)
                self._begin(metric)

    def together(self) -> AbstractContextManager[object]:
        """Nobody reads while this is held."""
        return self._lock

    def count(self, metric: Metric, *labels: str, by: float = 1) -> None:
        """Add to a counter."""
        with self._lock:
            counter = self._series(metric, labels)
            assert isinstance(counter, Counter), f"{metric.name} is no counter"
            counter.inc(by)

    def observe(self, metric: Metric, value: float, *labels: str, times: int = 1) -> None:
        """Add observations to a histogram."""
        with self._lock:
            histogram = self._series(metric, labels)
            assert isinstance(histogram, Histogram), f"{metric.name} is no histogram"
            _observe(histogram, value, times)

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            gauge = self._series(metric, labels)
            assert isinstance(gauge, Gauge), f"{metric.name} is no gauge"
            gauge.set(value)

    def ask(self, metric: Metric, ask: Ask) -> None:
        """Call `ask` for a gauge's values at every reading, in the thread that reads."""
        self._asked[metric] = ask

    def before_reading(self, count: Callable[[], None]) -> None:
        """Call `count` before every reading: it may count what it has held back."""
        self._before.append(count)

    def collect(self) -> list[Family]:
        """Everything as of one moment; gauges that are asked for, as of right before."""
        for count in self._before:
            count()
        answers = {metric: ask() for metric, ask in self._asked.items()}
        with self._lock:
            for metric, values in answers.items():
                self._replace(metric, values)
            return list(self._registry.collect())

    def _replace(self, metric: Metric, values: Mapping[Labels, float]) -> None:
        """Show these values of a gauge and no others; of those that share a label, the highest."""
        shown: dict[Labels, float] = {}
        for labels, value in values.items():
            key = self._bounded(metric, labels)
            shown[key] = max(shown.get(key, value), value)
        self._instruments[metric].clear()
        self._begin(metric)
        for labels, value in shown.items():
            self.set(metric, value, *labels)

    def _begin(self, metric: Metric) -> None:
        """Show the series that are known beforehand, at zero."""
        for labels in product(*metric.values) if metric.values else ():
            self._series(metric, labels)

    def _series(self, metric: Metric, labels: Labels) -> Instrument:
        instrument = self._instruments[metric]
        return instrument.labels(*self._bounded(metric, labels)) if labels else instrument

    def _bounded(self, metric: Metric, labels: Labels) -> Labels:
        pairs = zip(metric.labels, labels, strict=True)
        return tuple(self._known_value(label, value) for label, value in pairs)

    def _known_value(self, label: str, value: str) -> str:
        if label not in _FROM_OUTSIDE:
            return value
        value = visible(value)
        known = self._known.setdefault(label, {OTHER})
        if value not in known:
            if len(known) > self._most_values:
                return OTHER
            known.add(value)
        return value


def _instrument(metric: Metric, registry: CollectorRegistry) -> Instrument:
    if metric.kind is Kind.HISTOGRAM:
        return Histogram(
            metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=registry
        )
    kind = Counter if metric.kind is Kind.COUNTER else Gauge
    return kind(metric.name, metric.help, metric.labels, registry=registry)


def _observe(histogram: Histogram, value: float, times: int) -> None:
    """The client's `observe`, so many times at once: engines have thousands of equal values."""
    histogram._buckets[bisect_left(histogram._upper_bounds, value)].inc(times)
    histogram._sum.inc(value * times)
