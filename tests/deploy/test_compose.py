"""The compose file, beside the schema of compose files and the program that it runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest
from deploy.deployed import DEPLOY, SETTINGS, check_command, documents

FILE = DEPLOY / "compose.yaml"
(COMPOSE,) = documents(FILE)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {n: s for n, s in SERVICES.items() if s["image"].startswith("specbatch:")}
PINNED = re.compile(r"^[a-z0-9./-]+:v?\d+\.\d+\.?\d*[a-z0-9.-]*$")
NEEDED = ("REDIS_PASSWORD", "POSTGRES_PASSWORD", "GRAFANA_PASSWORD", "MODELS", "DATA")


def test_it_is_a_compose_file() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(FILE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_itself_reads_it_where_there_is_one() -> None:
    # Where Docker's plugin is missing, the schema above has to do.
    docker = shutil.which("docker") or "false"
    asked = [docker, "compose", "version"]
    if subprocess.run(asked, capture_output=True, check=False).returncode == 0:
        words = [docker, "compose", "-f", str(FILE), "config", "--quiet"]
        given = dict.fromkeys(NEEDED, "/given") | {"PATH": os.environ["PATH"], "HOME": "/"}
        done = subprocess.run(words, env=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_there_is_one_worker_of_each_kind_and_what_watches_them() -> None:
    commands = {name: service["command"] for name, service in OURS.items()}
    assert {c[1] for c in commands.values() if c[0] == "worker"} == {
        *("ingest", "propose", "verify", "record"),
    }
    assert {"redis", "postgres", "prometheus", "grafana", "alertmanager"} <= set(SERVICES)
    assert commands["scheduler"][0] == "scheduler"


@pytest.mark.parametrize("name", OURS)
def test_services_run_commands_and_settings_that_there_are(name: str) -> None:
    check_command(["specbatch", *OURS[name]["command"]])
    variables = {v for v in OURS[name]["environment"] if v.startswith("SPECBATCH_")}
    assert variables <= SETTINGS, variables - SETTINGS


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned_to_a_version(name: str) -> None:
    assert PINNED.match(SERVICES[name]["image"]), SERVICES[name]["image"]


def test_no_password_stands_in_the_file_and_each_has_a_line_in_the_example() -> None:
    asked = set(re.findall(r"\$\{(\w+):\?", FILE.read_text()))
    assert asked == set(NEEDED)
    example = (DEPLOY / "example.env").read_text()
    assert {line.split("=")[0] for line in example.splitlines() if "=" in line} >= asked
    for name in NEEDED:
        if name.endswith("PASSWORD"):
            assert f"\n{name}=\n" in f"\n{example}"


def test_what_is_mounted_from_here_is_here() -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), f"{name}: {source}"
            elif not source.startswith("$"):
                assert source in COMPOSE["volumes"], f"{name}: {source}"


def test_workers_have_the_time_to_give_their_groups_back() -> None:
    for name, service in OURS.items():
        assert int(service["stop_grace_period"].removesuffix("s")) >= 60, name


def test_only_this_machine_reaches_what_is_published() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_prometheus_asks_the_services_that_serve_metrics() -> None:
    (config,) = documents(DEPLOY / "prometheus" / "prometheus.yml")
    (scrape,) = [s for s in config["scrape_configs"] if s["job_name"] == "specbatch"]
    (found,) = scrape["dns_sd_configs"]
    serving = {name for name, service in OURS.items() if service["command"][0] == "worker"}
    assert set(found["names"]) == serving
    for name in serving:
        assert OURS[name]["environment"]["SPECBATCH_METRICS_PORT"] == str(found["port"])
        assert OURS[name]["environment"]["SPECBATCH_METRICS_ADDRESS"] == "0.0.0.0", "not loopback"
