"""The page of all metrics, from their catalogue."""

from __future__ import annotations

from specbatch.pipeline.observe.metrics.metric_names import METRICS, Kind, Metric, Scope
from specbatch.tools.site.markdown import code, page, plain, section, table

_INTRO = """
Every worker serves these at `/metrics` in Prometheus' text format. Labels are bounded: a job is
labelled by its name and not its id, the names beyond the first ones are `other`, and no label
ever has a text, a row's id or a key in it.
"""
_OF_PROCESS = """
What this process did since it started: add them up over processes, as `sum(rate(…[5m]))`.
"""
_OF_STORE = """
Read from the store, so every worker tells the same: take `max(…)`, never the sum.
"""


def metrics_page() -> str:
    """Every metric, by whose figure it is."""
    return page(
        "Metrics",
        _INTRO,
        section("Of a process", _OF_PROCESS, _table(Scope.PROCESS)),
        section("Of the store", _OF_STORE, _table(Scope.STORE)),
        section("Buckets of histograms", _buckets()),
    )


def _table(scope: Scope) -> str:
    rows = [
        (code(m.name), str(m.kind), ", ".join(map(code, m.labels)), plain(m.help))
        for m in METRICS
        if m.scope is scope
    ]
    return table(("metric", "type", "labels", "meaning"), rows)


def _buckets() -> str:
    rows = [(code(m.name), _bounds(m)) for m in METRICS if m.kind is Kind.HISTOGRAM]
    return table(("metric", "upper bounds, beside +Inf"), rows)


def _bounds(metric: Metric) -> str:
    return ", ".join(f"{bound:g}" for bound in metric.buckets)
