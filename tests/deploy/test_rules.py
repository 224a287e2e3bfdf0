"""The rules of Prometheus, by its own tools, and beside the catalogue and the runbooks."""

from __future__ import annotations

import re
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.deployed import DEPLOY, DOCS, RUNBOOKS, documents, problems_of, promtool, rules

from specbatch.jobs.schedules.definition import Schedule, load_folder
from support.tree import ROOT

pytestmark = pytest.mark.integration  # Prometheus' tools

PROMETHEUS = DEPLOY / "prometheus"
TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
ALERTS: dict[str, dict[str, Any]] = {rule["alert"]: rule for rule in rules("alerts.yml")}
RULES = [*rules("recording.yml"), *ALERTS.values()]
NAMES = [rule.get("alert") or rule["record"] for rule in RULES]


def test_prometheus_reads_its_rules_and_configuration(tmp_path: Path) -> None:
    done = promtool("check", "config", PROMETHEUS / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout
    # Debian's build knows no Kubernetes: what finds the pods is left out here, and looked at below.
    (config,) = documents(PROMETHEUS / "kubernetes.yml")
    found = [scrape.pop("kubernetes_sd_configs") for scrape in config["scrape_configs"]]
    (tmp_path / "rules").symlink_to(PROMETHEUS / "rules")
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    done = promtool("check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(sd["role"], sd["namespaces"]["names"]) for (sd,) in found] == [
        ("pod", ["specbatch"]),
        ("pod", ["gpu-operator"]),  # NVIDIA's exporter
    ]


@pytest.mark.parametrize("name", ["prometheus.yml", "kubernetes.yml"])
def test_scrapes_keep_the_label_job_as_workers_say_it(name: str) -> None:
    (config,) = documents(PROMETHEUS / name)
    (scrape,) = [s for s in config["scrape_configs"] if s["job_name"] == "specbatch"]
    assert scrape["honor_labels"] is True


@pytest.mark.parametrize("path", TESTS, ids=[path.stem for path in TESTS])
def test_rules_do_what_their_tests_say(path: Path) -> None:
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_examples_of_schedules_come_before_they_count_as_silent(tmp_path: Path) -> None:
    schedules, _ = load_folder(ROOT / "jobs" / "schedules" / "examples")
    last = "specbatch_schedule_last_success_timestamp_seconds"
    limit = "schedule:specbatch_schedule_silence_limit:seconds"
    intervals = [  # in place of the time of the last run
        {"series": f'{last}{{schedule="{one.name}"}}', "values": f"{longest_interval(one)}x5"}
        for one in schedules
    ]
    asked = [
        {"expr": f"{limit} <= on (schedule) {last}", "eval_time": "3m", "exp_samples": []},
        {
            "expr": f"count({limit} > on (schedule) {last})",
            "eval_time": "3m",
            "exp_samples": [{"labels": "{}", "value": len(schedules)}],
        },
    ]
    test = {
        "rule_files": [str(PROMETHEUS / "rules" / "recording.yml")],
        "tests": [{"interval": "1m", "input_series": intervals, "promql_expr_test": asked}],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    done = promtool("test", "rules", tmp_path / "test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def longest_interval(schedule: Schedule) -> int:
    """Of a year's times, in seconds."""
    times = list(takewhile(lambda at: at < 366 * 86400, schedule.times.after(0.0)))
    return int(max(later - earlier for earlier, later in pairwise(times)))


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_is_shown_to_fire_and_to_stay_silent(name: str) -> None:
    fires, silent = [], []
    for path in TESTS:
        for case in documents(path)[0]["tests"]:
            for asked in case["promql_expr_test"]:
                if f'alertname="{name}"' in asked["expr"]:
                    (fires if asked["exp_samples"] else silent).append(asked["eval_time"])
    assert fires, "no test shows it firing"
    assert silent, "no test shows it silent"


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_rules_ask_only_for_what_is_exported(rule: dict[str, Any]) -> None:
    assert problems_of(rule["expr"]) == []


def test_what_nobody_exports_is_found() -> None:
    assert problems_of("sum by (stage) (rate(specbatch_retries_total[5m]))") == []
    assert problems_of("specbatch_retried_total") == ["there is no series specbatch_retried_total"]
    assert problems_of('specbatch_cost_usd_total{tag="a"}') == [
        "specbatch_cost_usd_total has no label tag"
    ]
    assert problems_of("sum by (tag) (specbatch_cost_usd_total)") == [
        "no series here has a label tag"
    ]
    assert problems_of("specbatch_drift_kl_nats") == ["there is no series specbatch_drift_kl_nats"]


@pytest.mark.parametrize("name", ALERTS)
def test_alerts_say_how_bad_what_and_where_to_read_on(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("page", "ticket", "info", "none")
    assert set(alert["labels"]) <= {"severity", "during_rollout"}
    notes = alert["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert len(notes["summary"]) < 100
    assert notes["runbook_url"] == f"{DOCS}/runbooks/{name}.html"
    named = set(re.findall(r"\$labels\.(\w+)", notes["summary"] + notes["description"]))
    assert problems_of(f"{alert['expr']} or on ({', '.join(named)}) vector(0)") == []


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    pages = {path.stem for path in RUNBOOKS.glob("*.md")} - {"README", "postmortem"}
    assert pages == set(ALERTS)


def test_pages_and_index_say_the_alert_s_severity() -> None:
    index = (RUNBOOKS / "README.md").read_text()
    for name, alert in ALERTS.items():
        severity = alert["labels"]["severity"]
        assert f"\n*{severity}.* " in (RUNBOOKS / f"{name}.md").read_text(), name
        wakes = "yes" if severity == "page" else "no"
        assert f"| [{name}]({name}.md) | {wakes} |" in index
