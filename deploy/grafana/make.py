"""Makes the dashboards of this folder from `boards/*.yaml`.

    python deploy/grafana/make.py

A board is a title, some words and rows of panels; `boards/on-call.yaml` shows every field. What
Grafana wants besides (places, ids, datasource) is added here, so that a change of a query is a
change of one line. The JSON is schema version 42, the last of its kind, and loads in Grafana 12
and later.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
SCHEMA_VERSION = 42
COLUMNS = 24  # of Grafana's grid
DOCS = "https://docs.example.com/specbatch"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
TYPES = {"stat": 4, "graph": 8, "bars": 8, "heatmap": 8, "table": 8}  # and how high they are


def main() -> int:
    for source in sorted((HERE / "boards").glob("*.yaml")):
        (HERE / f"{source.stem}.json").write_text(made(source))
    return 0


def made(source: Path) -> str:
    """The dashboard of one board, as it stands in its file."""
    board = dashboard(source.stem, yaml.safe_load(source.read_text()))
    return json.dumps(board, indent=1, ensure_ascii=False) + "\n"


def dashboard(name: str, board: dict[str, Any]) -> dict[str, Any]:
    """Grafana's JSON of a board."""
    return {
        "uid": f"specbatch-{name}",
        "title": f"specbatch · {board['title']}",
        "description": board["says"],
        "tags": ["specbatch"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": board.get("refresh", "1m"),
        "time": {"from": f"now-{board['back']}", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "title": "specbatch",
                "tags": ["specbatch"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            },
            _link("runbooks", f"{DOCS}/runbooks/"),
        ],
        "templating": {"list": [_datasource_variable(), *map(_variable, board.get("pick", []))]},
        "annotations": {"list": [_rollouts()]},
        "panels": list(_panels(board["rows"])),
    }


def _panels(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    number, y = 1, 0
    for row in rows:
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        heading = {"id": number, "type": "row", "title": row["row"], "collapsed": False}
        yield heading | {"gridPos": place, "panels": []}
        number, y, x, lowest = number + 1, y + 1, 0, 0
        for panel in row["panels"]:
            (kind,) = panel.keys() & TYPES
            width, height = panel.get("wide", COLUMNS // len(row["panels"])), TYPES[kind]
            if x + width > COLUMNS:
                x, y, lowest = 0, y + lowest, 0
            place = {"x": x, "y": y, "w": width, "h": height}
            yield {"id": number, "gridPos": place} | _panel(kind, panel)
            number, x, lowest = number + 1, x + width, max(lowest, height)
        y += lowest


def _panel(kind: str, panel: dict[str, Any]) -> dict[str, Any]:
    shown = {"table": "table", "stat": "stat", "heatmap": "heatmap"}.get(kind, "timeseries")
    return {
        "type": shown,
        "title": panel[kind],
        "description": panel["says"],
        "datasource": DATASOURCE,
        "targets": list(_targets(kind, panel["asks"])),
        "fieldConfig": {"defaults": _defaults(kind, panel), "overrides": []},
        "options": _options(kind),
        "links": [_link(f"runbook {name}", _runbook(name)) for name in panel.get("runbooks", [])],
    }


def _targets(kind: str, asks: dict[str, str]) -> Iterator[dict[str, Any]]:
    """`asks` is PromQL by legend."""
    for place, (legend, query) in enumerate(asks.items()):
        target = {
            "refId": chr(ord("A") + place),
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": " ".join(query.split()),
            "legendFormat": legend,
        }
        if kind == "heatmap":
            target |= {"format": "heatmap"}
        if kind == "table":
            target |= {"format": "table", "instant": True, "range": False}
        yield target


def _defaults(kind: str, panel: dict[str, Any]) -> dict[str, Any]:
    steps = [{"value": None, "color": "green"}]
    for bound, colour in panel.get("thresholds", {}).items():
        at = None if bound == "from" else bound
        step = {"value": at, "color": colour}
        steps = [step, *steps[1:]] if at is None else [*steps, step]
    found: dict[str, Any] = {
        "unit": panel["unit"],
        "color": {"mode": "thresholds" if kind == "stat" else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
        "noValue": panel.get("nothing", "–"),
    }
    if "digits" in panel:
        found["decimals"] = panel["digits"]
    if kind in ("graph", "bars"):
        lines = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
        stacked = {"drawStyle": "line", "lineWidth": 0, "fillOpacity": 60, "showPoints": "never"}
        found["custom"] = stacked if kind == "bars" else lines
        found["custom"]["stacking"] = {"mode": "normal" if kind == "bars" else "none"}
        found["custom"]["thresholdsStyle"] = {"mode": "line" if len(steps) > 1 else "off"}
        found["min"] = 0
    return found


def _options(kind: str) -> dict[str, Any]:
    if kind == "stat":
        calculations = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": calculations, "colorMode": "value", "graphMode": "area"}
    if kind == "heatmap":
        return {
            "calculate": False,
            "yAxis": {"axisPlacement": "left"},
            "color": {"mode": "scheme", "scheme": "Blues", "steps": 32},
            "tooltip": {"mode": "single", "showColorScale": True},
        }
    if kind == "table":
        return {"showHeader": True}
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "source", "type": "datasource", "query": "prometheus"}


def _variable(picked: dict[str, str]) -> dict[str, Any]:
    (label, metric) = next(iter(picked.items()))
    return {
        "name": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": f"label_values({metric}, {label})", "refId": label},
        "definition": f"label_values({metric}, {label})",
        "refresh": 2,
        "sort": 1,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _rollouts() -> dict[str, Any]:
    return {
        "name": "planned rollouts",
        "enable": True,
        "datasource": DATASOURCE,
        "expr": "max(specbatch_planned_rollout) == 1",
        "iconColor": "purple",
        "titleFormat": "a rollout is announced",
    }


def _runbook(name: str) -> str:
    return f"{DOCS}/runbooks/{name}.html"


def _link(title: str, url: str) -> dict[str, Any]:
    return {"type": "link", "title": title, "url": url, "targetBlank": True}


if __name__ == "__main__":
    sys.exit(main())
