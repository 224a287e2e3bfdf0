"""The dashboards: as their boards make them, complete, beside the catalogue and the runbooks."""

from __future__ import annotations

import json
import runpy
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from deploy.deployed import DEPLOY, DOCS, RUNBOOKS, check_promql, documents, problems_of, rules

from specbatch.pipeline.observe.metrics.metric_names import METRICS

pytestmark = pytest.mark.integration  # Prometheus' tools

GRAFANA = DEPLOY / "grafana"
MAKER = runpy.run_path(str(GRAFANA / "make.py"))
NAMES = ("executive", "on-call", "debug")
LATEST_SCHEMA = 42  # the last of the classic format


def board(name: str) -> dict[str, Any]:
    return dict(json.loads((GRAFANA / f"{name}.json").read_text()))


def panels(name: str) -> list[dict[str, Any]]:
    """Those that show something."""
    return [panel for panel in board(name)["panels"] if panel["type"] != "row"]


def queries(name: str) -> list[str]:
    return [target["expr"] for panel in panels(name) for target in panel["targets"]]


def test_there_are_three_and_each_is_what_its_board_makes() -> None:
    assert {path.stem for path in (GRAFANA / "boards").glob("*.yaml")} == set(NAMES)
    assert {path.stem for path in GRAFANA.glob("*.json")} == set(NAMES)
    for name in NAMES:
        made = MAKER["made"](GRAFANA / "boards" / f"{name}.yaml")
        assert made == (GRAFANA / f"{name}.json").read_text(), "python deploy/grafana/make.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_loads_anywhere_and_explains_itself(name: str) -> None:
    found = board(name)
    assert found["schemaVersion"] == LATEST_SCHEMA
    assert found["uid"] == f"specbatch-{name}"
    assert found["description"]
    variables = {v["name"]: v for v in found["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in found["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels(name):
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert [step["value"] for step in steps][:1] == [None]
        bounds = [step["value"] for step in steps[1:]]
        assert bounds == sorted(bounds), panel["title"]


@pytest.mark.parametrize("name", NAMES)
def test_panels_lie_beside_each_other_and_within_the_grid(name: str) -> None:
    places = [(panel["title"], panel["gridPos"]) for panel in board(name)["panels"]]
    for title, place in places:
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24, title
    for (one, a), (other, b) in combinations(places, 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, f"{one} lies over {other}"


@pytest.mark.parametrize("name", NAMES)
def test_queries_parse_and_ask_only_for_what_is_exported(name: str, tmp_path: Path) -> None:
    check_promql(queries(name), tmp_path)
    wrong = {query: found for query in queries(name) if (found := problems_of(query))}
    assert not wrong
    for variable in board(name)["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = variable["definition"][len("label_values(") : -1].split(", ")
            assert problems_of(f"sum by ({label}) ({metric})") == []


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_runbooks_that_there_are(name: str) -> None:
    for panel in panels(name):
        for link in panel["links"]:
            runbook = link["url"].removeprefix(f"{DOCS}/runbooks/").removesuffix(".html")
            assert (RUNBOOKS / f"{runbook}.md").is_file(), link


OF_THE_EXECUTIVE = (
    *("CostAboveBaseline", "CostPerTokenCreeps", "SpendAboveLimit", "CorrectnessUnknown"),
)


def test_every_alert_is_led_to_from_the_dashboard_of_who_is_on_call() -> None:
    linked = {link["title"] for panel in panels("on-call") for link in panel["links"]}
    wanted = {
        f"runbook {rule['alert']}"
        for rule in rules("alerts.yml")
        # Of money and of audits that are not made: the executive one's.
        if rule["alert"] not in OF_THE_EXECUTIVE
    }
    assert wanted <= linked, wanted - linked
    everywhere = {link["title"] for n in NAMES for panel in panels(n) for link in panel["links"]}
    assert {f"runbook {rule['alert']}" for rule in rules("alerts.yml")} <= everywhere


def test_every_metric_is_on_a_dashboard() -> None:
    recorded = " ".join(rule["expr"] for rule in rules("recording.yml"))
    shown = " ".join([recorded, *(query for name in NAMES for query in queries(name))])
    assert [metric.name for metric in METRICS if metric.name not in shown] == []


def test_grafana_finds_datasource_and_dashboards_where_compose_puts_them() -> None:
    (compose,) = documents(DEPLOY / "compose.yaml")
    grafana = compose["services"]["grafana"]
    targets = {volume.split(":")[1] for volume in grafana["volumes"]}
    (provider,) = documents(GRAFANA / "provisioning" / "dashboards" / "specbatch.yaml")
    folder = provider["providers"][0]["options"]["path"]
    assert {f"{folder}/{name}.json" for name in NAMES} <= targets
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] in targets
    (sources,) = documents(GRAFANA / "provisioning" / "datasources" / "prometheus.yaml")
    (source,) = sources["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
