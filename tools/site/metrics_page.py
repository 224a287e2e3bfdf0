"""The page of all metrics, from their catalogue."""

from __future__ import annotations

from specbatch.pipeline.observe.metrics.metric_names import METRICS, Kind, Metric, Scope
from specbatch.tools.site.markdown import code, page, plain, section, table

_INTRO = """
Every worker's process serves these at `/metrics` in Prometheus' text format. Labels are bounded:
a job is labelled by its name and not its id, names beyond the first ones become `other`, and no
label ever contains a text, a row's id or a key.
"""
_OF_PROCESS = """
What this process did since it started. Add them up over processes, as in `sum(rate(…[5m]))`.
"""
_OF_STORE = """
Read from the store, so every process reports the same: take `max(…)`, never the sum.
"""


def metrics_page() -> str:
    """Every metric, by scope."""
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
    return table(("metric", "upper bounds, besides +Inf"), rows)


def _bounds(metric: Metric) -> str:
    return ", ".join(f"{bound:g}" for bound in metric.buckets)
