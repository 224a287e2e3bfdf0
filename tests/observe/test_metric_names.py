"""The list of metrics is what is documented, and keeps Prometheus' customs."""

from __future__ import annotations

import re

import pytest

from specbatch.pipeline.observe.metrics.metric_names import METRICS, Kind, Metric

UNITS = ("_tokens", "_seconds", "_usd", "_nats", "_ratio")
each = pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)


@each
def test_names_tell_type_and_unit(metric: Metric) -> None:
    assert re.fullmatch(r"specbatch_[a-z][a-z_]*[a-z]", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    if metric.kind is Kind.HISTOGRAM:
        bare = metric.name.removesuffix("_per_call").removesuffix("_depth")
        assert bare.endswith((*UNITS, "_speculation")), "a histogram's unit is in its name"
    for ending in ("_count", "_sum", "_bucket"):
        assert not metric.name.endswith(ending), "Prometheus' own"


@each
def test_every_metric_says_what_it_is_and_every_label_is_a_word(metric: Metric) -> None:
    assert metric.help
    assert not metric.help.endswith(".")
    assert "\n" not in metric.help
    for label in metric.labels:
        assert re.fullmatch(r"[a-z_]+", label)
        assert label not in ("le", "quantile")
    if metric.values:
        assert len(metric.values) == len(metric.labels)


@each
def test_only_histograms_have_buckets_and_they_rise(metric: Metric) -> None:
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_names_are_there_once() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_no_label_could_name_a_row_a_text_or_a_tenant() -> None:
    labels = {label for metric in METRICS for label in metric.labels}
    assert labels == {
        *("job", "tag", "proposer", "origin", "finish_reason", "state", "kind", "what", "stage"),
        *("code", "result", "schedule", "version", "numeric_class", "outcome", "scope", "of"),
        *("verdict", "period"),
    }
