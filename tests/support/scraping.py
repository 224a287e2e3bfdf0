"""What a metrics endpoint says, as numbers."""

from __future__ import annotations

import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from specbatch.pipeline.observe.metrics.metric_names import Metric
from specbatch.pipeline.observe.metrics.registry import Metrics

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """One answer, parsed as Prometheus' own client does."""

    text: str

    @cached_property
    def types(self) -> dict[str, str]:
        """Type by metric, samples or not. Counters have their whole name."""
        return {
            f"{family.name}_total" if family.type == "counter" else family.name: family.type
            for family in text_string_to_metric_families(self.text)
        }

    @cached_property
    def samples(self) -> Mapping[str, dict[Labels, float]]:
        """By sample name, as `..._bucket`, and labels."""
        found: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
        for family in text_string_to_metric_families(self.text):
            for sample in family.samples:
                found[sample.name][frozenset(sample.labels.items())] = sample.value
        return found

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels."""
        wanted = set(labels.items())
        return sum(v for of, v in self.samples.get(name, {}).items() if wanted <= of)

    def series(self, metric: Metric, suffix: str = "") -> dict[tuple[str, ...], float]:
        """Value by labels, in the metric's order. A histogram needs a suffix: `_count`, `_sum`."""
        found = {}
        for labels, value in self.samples.get(metric.name + suffix, {}).items():
            of = dict(labels)
            found[tuple(of[label] for label in metric.labels)] = value
        return found

    def values_of(self, name: str, label: str) -> set[str]:
        """What a label says."""
        return {value for of in self.samples.get(name, {}) for key, value in of if key == label}


def reading(metrics: Metrics) -> Scrape:
    """What a scrape of these would answer."""
    registry = CollectorRegistry()
    registry.register(metrics)
    return Scrape(generate_latest(registry).decode())


def scrape(port: int, timeout_sec: float = 30.0) -> Scrape:
    """Ask the endpoint on this machine. Raises `OSError`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=timeout_sec) as answer:
        return Scrape(answer.read().decode())
