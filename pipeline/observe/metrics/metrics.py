"""What a process counts, in plain numbers. It knows no Prometheus: `metrics/endpoint.py` does.

Whoever counts pays for one lock and one addition, so engines may count at every step; and what was
counted together is read together. A label that comes from outside may have so many values in a
process; further ones are counted as `other`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import product

from specbatch.pipeline.observe.metrics.metric_names import METRICS, Kind, Metric, Scope

MOST_VALUES = 50
OTHER = "other"
_FROM_OUTSIDE = frozenset({"job", "tag", "proposer", "code"})

Labels = tuple[str, ...]
# Of a histogram: how many observations lie in each bucket, and above all of them; then their sum.
Value = float | list[float]
Snapshot = dict[str, dict[Labels, Value]]
Asked = Callable[[], Mapping[Labels, float]]

_MINE = {metric.name: metric for metric in METRICS if metric.scope is Scope.PROCESS}


class Metrics:
    """All metrics of one process. Thread-safe."""

    def __init__(self, most_values: int = MOST_VALUES) -> None:
        self._lock = threading.RLock()
        self._most_values = most_values
        self._known: dict[str, set[str]] = {}  # values of labels from outside
        self._asked: dict[str, Asked] = {}
        self._before: list[Callable[[], None]] = []
        self._values: Snapshot = {}
        for name, metric in _MINE.items():
            self._values[name] = _beginning(metric)

    def together(self) -> AbstractContextManager[object]:
        """Nobody reads while this is held."""
        return self._lock

    def count(self, metric: Metric, *labels: str, by: float = 1) -> None:
        """Add to a counter."""
        with self._lock:
            of = self._values[metric.name]
            key = self._bounded(metric, labels)
            before = of.get(key, 0)
            assert not isinstance(before, list), f"{metric.name} is a histogram"
            of[key] = before + by

    def observe(self, metric: Metric, value: float, *labels: str, times: int = 1) -> None:
        """Add observations to a histogram."""
        with self._lock:
            of = self._values[metric.name]
            key = self._bounded(metric, labels)
            if key not in of:
                of[key] = _nothing(metric)
            found = of[key]
            assert isinstance(found, list), f"{metric.name} is no histogram"
            found[bisect_left(metric.buckets, value)] += times
            found[-1] += value * times

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """What a gauge shows from now on."""
        with self._lock:
            self._values[metric.name][self._bounded(metric, labels)] = value

    def ask(self, metric: Metric, asked: Asked) -> None:
        """Have a gauge's values asked for whenever somebody reads. Called in any thread."""
        self._asked[metric.name] = asked

    def before_reading(self, count: Callable[[], None]) -> None:
        """Have this called whenever somebody reads: it may count what it held back."""
        self._before.append(count)

    def read(self) -> Snapshot:
        """All there is, of one moment; gauges that are asked for, of right before."""
        for count in self._before:
            count()
        found = {name: asked() for name, asked in self._asked.items()}
        with self._lock:
            for name, values in found.items():
                metric = _MINE[name]
                shown = _beginning(metric)
                for labels, value in values.items():
                    key = self._bounded(metric, labels)
                    shown[key] = highest(shown[key], value) if key in shown else value
                self._values[name] = shown
            return {name: copied(values) for name, values in self._values.items()}

    def _bounded(self, metric: Metric, labels: Labels) -> Labels:
        assert len(labels) == len(metric.labels), f"labels of {metric.name}"
        if _FROM_OUTSIDE.isdisjoint(metric.labels):
            return labels
        return tuple(map(self._known_value, metric.labels, labels))

    def _known_value(self, label: str, value: str) -> str:
        if label not in _FROM_OUTSIDE:
            return value
        known = self._known.setdefault(label, set())
        if value not in known:
            if len(known) >= self._most_values:
                return OTHER
            known.add(value)
        return value


def _beginning(metric: Metric) -> dict[Labels, Value]:
    """The series that are known beforehand."""
    known = product(*metric.values) if metric.values or not metric.labels else ()
    return {labels: _nothing(metric) for labels in known}


def _nothing(metric: Metric) -> Value:
    return [0] * (len(metric.buckets) + 2) if metric.kind is Kind.HISTOGRAM else 0


def copied(values: Mapping[Labels, Value]) -> dict[Labels, Value]:
    return {key: list(v) if isinstance(v, list) else v for key, v in values.items()}


def added(one: Value, other: Value) -> Value:
    """The sum; a histogram's numbers one by one."""
    if isinstance(one, list) and isinstance(other, list):
        return [a + b for a, b in zip(one, other, strict=True)]
    assert not isinstance(one, list), "both are histograms or none is"
    assert not isinstance(other, list), "both are histograms or none is"
    return one + other


def highest(one: Value, other: Value) -> Value:
    assert not isinstance(one, list), "a gauge"
    assert not isinstance(other, list), "a gauge"
    return max(one, other)


def merged(snapshots: Iterable[Mapping[str, Mapping[Labels, Value]]]) -> Snapshot:
    """One of several processes': sums, but of gauges of which the highest counts.

    What is no metric, or a histogram with other buckets (of another version), is left out.
    """
    found: Snapshot = {name: {} for name in _MINE}
    for snapshot in snapshots:
        for name, values in snapshot.items():
            metric = _MINE.get(name)
            if metric is None:
                continue
            put = highest if metric.highest else added
            of, like = found[name], _nothing(metric)
            for labels, value in values.items():
                if not _is_like(value, like):
                    continue
                of[labels] = put(of[labels], value) if labels in of else value
    return {name: copied(values) for name, values in found.items()}


def counted(snapshot: Mapping[str, Mapping[Labels, Value]]) -> Snapshot:
    """What outlives a process: its counters and histograms."""
    return {
        name: copied(values)
        for name, values in snapshot.items()
        if name in _MINE and _MINE[name].kind is not Kind.GAUGE
    }


def _is_like(value: Value, like: Value) -> bool:
    if isinstance(like, list):
        return isinstance(value, list) and len(value) == len(like)
    return isinstance(value, int | float)
