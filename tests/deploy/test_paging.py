"""A scheduled run that fails pages: store, metrics, Prometheus, Alertmanager, a receiver."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pytest
import yaml
from contracts.shorthand import ended
from deploy.deployed import DEPLOY, documents, promtool
from deploy.test_alertmanager import CONFIG, PrivateAlertmanager

from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.observe.metrics.endpoint import Exposure
from specbatch.schemas.records import JobState
from specbatch.schemas.schedules import RunState, ScheduleRun
from specbatch.schemas.settings import Settings
from support.databases import migrated
from support.servers import PrivateServer, find_binary, free_port

pytestmark = pytest.mark.integration  # Prometheus and Alertmanager

HERE = "127.0.0.1"
# The rule compares with a minute ago, for which nobody waits here.
RECORDED = "schedule_outcome:specbatch_schedule_failed_runs:max"
FAILED = 'alertmanager_notification_requests_failed_total{integration="webhook"'
Pages = Queue[dict[str, Any]]


class PrivatePrometheus(PrivateServer):
    """Prometheus with the rules of `deploy/`. It scrapes one target and evaluates every second."""

    name = "prometheus"

    def __init__(self, target: str, alertmanager: str) -> None:
        super().__init__()
        self._target, self._alertmanager = target, alertmanager

    @property
    def url(self) -> str:
        return f"http://{HERE}:{self.port}"

    def prepare(self) -> None:
        (config,) = documents(DEPLOY / "prometheus" / "prometheus.yml")
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = ["rules/*.yml"]
        config["alerting"] = {
            "alertmanagers": [{"static_configs": [{"targets": [self._alertmanager]}]}]
        }
        (scrape,) = [s for s in config["scrape_configs"] if s["job_name"] == "specbatch"]
        del scrape["dns_sd_configs"], scrape["relabel_configs"]
        scrape["static_configs"] = [{"targets": [self._target]}]
        config["scrape_configs"] = [scrape]
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (self.folder / "rules").mkdir()
        for path in (DEPLOY / "prometheus" / "rules").glob("*.yml"):
            (rules,) = documents(path)
            for group in rules["groups"]:
                group.pop("interval", None)
            (self.folder / "rules" / path.name).write_text(yaml.safe_dump(rules))
        history = self.folder / "history.txt"
        labels = '{schedule="nightly",outcome="failed"}'
        now = int(time.time())
        lines = [f"{RECORDED}{labels} 0 {at}" for at in range(now - 600, now - 120, 30)]
        history.write_text("\n".join([f"# TYPE {RECORDED} gauge", *lines, "# EOF", ""]))
        made = promtool("tsdb", "create-blocks-from", "openmetrics", history, self.folder / "data")
        assert made.returncode == 0, made.stdout + made.stderr

    def command(self) -> list[str]:
        options = {
            "config.file": self.folder / "prometheus.yml",
            "storage.tsdb.path": self.folder / "data",
            "web.listen-address": f"{HERE}:{self.port}",
        }
        binary = find_binary("prometheus", package="prometheus")
        return [binary, *(f"--{name}={value}" for name, value in options.items())]

    def answers(self) -> bool:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return bool(direct.open(self.url + "/-/ready", timeout=5).status == 200)


@pytest.fixture
def pager() -> Iterator[tuple[str, Pages]]:
    """A receiver's address, and what it is told."""
    told: Pages = Queue()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            told.put(json.loads(self.rfile.read(length)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer((HERE, 0), Receiver) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{HERE}:{server.server_address[1]}/", told
        server.shutdown()
        thread.join()


def paging(path: Path, url: str | None = None) -> Path:
    """The configuration of `deploy/` with a pager, which is told at once; None: as it is there."""
    (config,) = documents(CONFIG)
    config["route"]["group_wait"] = "0s"
    (page,) = [one for one in config["receivers"] if one["name"] == "page"]
    if url is not None:
        page["webhook_configs"] = [{"url": url}]
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_scheduled_run_that_fails_pages(tmp_path: Path, pager: tuple[str, Pages]) -> None:
    url, told = pager
    store, port = open_store(migrated(tmp_path / "store.db")), free_port()
    settings = Settings(workspace="unused", metrics_port=port, metrics_address=HERE)
    with ExitStack() as stack:
        stack.callback(store.close)
        exposure = Exposure(settings, lambda: None)
        stack.callback(exposure.close)
        exposure.watch(store.figures)
        alertmanager = PrivateAlertmanager(paging(tmp_path / "alertmanager.yml", url))
        stack.enter_context(alertmanager)
        target = f"{HERE}:{alertmanager.port}"
        stack.enter_context(PrivatePrometheus(f"{HERE}:{port}", target))
        run = ScheduleRun("nightly", time.time(), RunState.SUBMITTED, "jobfailed")
        store.note_schedule_run(run)
        ended(store, "jobfailed", JobState.FAILED)
        while True:
            (page, *_) = told.get(timeout=60)["alerts"]
            if page["labels"]["alertname"] == "NightlyRunFailed":
                break
    assert page["status"] == "firing"
    assert page["labels"]["schedule"] == "nightly"
    assert page["labels"]["outcome"] == "failed"
    assert page["annotations"]["summary"] == "nightly: 1 runs ended as failed"
    assert page["annotations"]["runbook_url"].endswith("/runbooks/NightlyRunFailed.html")


def test_a_page_fails_loudly_while_no_pager_is_set(tmp_path: Path) -> None:
    with PrivateAlertmanager(paging(tmp_path / "alertmanager.yml")) as alertmanager:
        labels = {"alertname": "NightlyRunFailed", "severity": "page"}
        alertmanager.ask("/api/v2/alerts", [{"labels": labels}]).close()
        failed, until = 0.0, time.monotonic() + 30
        while not failed and time.monotonic() < until:
            with alertmanager.ask("/metrics") as answer:
                lines = answer.read().decode().splitlines()
            failed = sum(float(line.split()[-1]) for line in lines if line.startswith(FAILED))
    assert failed
