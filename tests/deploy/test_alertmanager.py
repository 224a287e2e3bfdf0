"""Alertmanager's configuration, by its own tool and in a real one on a free port."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deploy.deployed import DEPLOY, amtool, rules

from support.servers import PrivateServer, find_binary

pytestmark = pytest.mark.integration  # Prometheus' tools

CONFIG = DEPLOY / "alertmanager" / "alertmanager.yml"
LABELS: dict[str, dict[str, str]] = {
    rule["alert"]: {"alertname": rule["alert"], **rule["labels"]} for rule in rules("alerts.yml")
}
# Never kept back: outputs may be wrong, or a night is missing.
ALWAYS = {
    *("CorrectnessBudgetBurnsFast", "CorrectnessBudgetBurnsSlowly"),
    *(
        "NightlyRunMissing",
        "NightlyRunFailed",
        "DeadlineAtRisk",
        "ScheduleSilent",
        "RowsQuarantined",
        "RolloutForgotten",
    ),
    "StoreUnreachable",
}
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class PrivateAlertmanager(PrivateServer):
    """Prometheus' Alertmanager. With the configuration of `deploy/` it tells nobody."""

    name = "alertmanager"

    def __init__(self, config: Path = CONFIG) -> None:
        super().__init__()
        self._config = config

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        folders = ["/usr/bin", "/opt/prometheus"]
        try:
            binary = find_binary("prometheus-alertmanager", folders, package="…")
        except RuntimeError:
            binary = find_binary("alertmanager", folders, package="prometheus-alertmanager")
        options = {
            "config.file": str(self._config),
            "storage.path": str(self.folder / "data"),
            "web.listen-address": f"127.0.0.1:{self.port}",
            "cluster.listen-address": "",
        }
        return [binary, *(f"--{name}={value}" for name, value in options.items())]

    def answers(self) -> bool:
        return bool(self.ask("/-/ready").status == 200)

    def ask(self, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        return _direct.open(request, timeout=5)

    def kept_back(self, *names: str, expected: set[str]) -> set[str]:
        """Which of these alerts, when all of them fire, nobody is told of.

        What keeps others back does so a moment after it is there: it is waited for.
        """
        kept = set[str]()
        self.ask("/api/v2/alerts", [{"labels": LABELS[name]} for name in names]).close()
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with self.ask("/api/v2/alerts") as answer:
                found = json.load(answer)
            states = {a["labels"]["alertname"]: a["status"]["state"] for a in found}
            if set(states) >= set(names) and "unprocessed" not in states.values():
                kept = {name for name, state in states.items() if state == "suppressed"}
                if kept == expected:
                    return kept
            time.sleep(0.02)
        assert set(states) >= set(names), f"not all of {names} came: {states}"
        return kept


@pytest.fixture
def alertmanager() -> Iterator[PrivateAlertmanager]:
    with PrivateAlertmanager() as server:
        yield server


def test_a_planned_rollout_keeps_back_what_it_brings_with_it_and_nothing_else(
    alertmanager: PrivateAlertmanager,
) -> None:
    quiet = {name for name, of in LABELS.items() if of.get("during_rollout") == "quiet"}
    assert not quiet & ALWAYS
    assert {"WorkerDown", "LeasesStuck", "NoWorkerAnswers"} <= quiet
    # One after another: those that keep back others are tried below.
    others = set(LABELS) - {"PlannedRollout", "NoWorkerAnswers", "NoDeviceForOpenWork"}
    assert alertmanager.kept_back(*others, expected=set()) == set()
    expected = quiet & others
    assert alertmanager.kept_back(*others, "PlannedRollout", expected=expected) == expected


def test_who_has_no_workers_is_told_just_that(alertmanager: PrivateAlertmanager) -> None:
    fire, expected = ("NoWorkerAnswers", "WorkerDown", "NightlyRunMissing"), {"WorkerDown"}
    assert alertmanager.kept_back(*fire, expected=expected) == expected


def test_amtool_reads_the_configuration() -> None:
    done = amtool("check-config", CONFIG)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", LABELS)
def test_each_severity_has_its_receiver(name: str) -> None:
    labels = [f"{key}={value}" for key, value in LABELS[name].items()]
    done = amtool("config", "routes", "test", f"--config.file={CONFIG}", *labels)
    told = {"page": "page", "ticket": "ticket", "info": "nobody", "none": "nobody"}
    assert done.stdout.strip() == told[LABELS[name]["severity"]], done.stderr
