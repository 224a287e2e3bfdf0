"""The documented table of metrics, made of the list that the code counts by."""

from __future__ import annotations

from specbatch.pipeline.observe.metrics.metric_names import METRICS, Metric, Scope

_ROOMS = (
    (Scope.PROCESS, "Of each process", "Add them up over processes: `sum`, or `sum by`."),
    (Scope.STORE, "Of the whole store", "Every worker says the same: take `max`, or `max by`."),
)


def reference_table() -> str:
    """Markdown: a heading and a table for each scope."""
    parts = []
    for scope, title, how in _ROOMS:
        lines = [_line(metric) for metric in METRICS if metric.scope is scope]
        head = ["| metric | type | labels | what it is |", "|---|---|---|---|"]
        parts.append("\n".join([f"## {title}", "", how, "", *head, *lines]))
    return "\n\n".join(parts) + "\n"


def _line(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "none"
    text = metric.help.replace("|", "\\|")
    return f"| `{metric.name}` | {metric.kind} | {labels} | {text} |"
