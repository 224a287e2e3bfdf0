"""What `deploy/` holds, read; and the programs that know more of it than we do."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import typer
import yaml

from specbatch.jobs.cli import main as every_command
from specbatch.jobs.cli import submit_job
from specbatch.pipeline.observe.metrics.metric_names import METRICS, Kind
from specbatch.schemas.settings import Settings
from support.servers import find_binary
from support.tree import ROOT

DEPLOY = ROOT / "deploy"
RUNBOOKS = ROOT / "docs" / "runbooks"
DOCS = "https://docs.example.com/specbatch"

APPS: dict[str, Any] = {
    "specbatch": typer.main.get_command(every_command.app),
    "submit-job": typer.main.get_command(submit_job.app),
}
# Read by ours beside the settings.
OTHER_VARIABLES = {"SPECBATCH_SETTINGS", "SPECBATCH_NATIVE", "SPECBATCH_NATIVE_ISA"}
SETTINGS = {f"SPECBATCH_{name.upper()}" for name in Settings.model_fields} | OTHER_VARIABLES


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Prometheus' own checker."""
    return _run("promtool", "prometheus", *arguments)


def amtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Alertmanager's own checker."""
    return _run("amtool", "prometheus-alertmanager", *arguments)


def _run(name: str, package: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [find_binary(name, package=package), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def documents(path: Path) -> list[dict[str, Any]]:
    """All YAML documents of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def check_command(words: list[str]) -> None:
    """Raise `click.UsageError` unless it is a command of ours with arguments that it takes."""
    app, (name, *arguments) = APPS[words[0]], words[1:] or [""]
    if isinstance(app, click.Group) or hasattr(app, "commands"):
        if name not in app.commands:
            raise click.UsageError(f"there is no `{words[0]} {name}`")
        app = app.commands[name]
    else:
        arguments = words[1:]
    app.make_context(words[0], list(arguments))


def commands_in(text: str) -> Iterator[list[str]]:
    """`specbatch …` and `submit-job …` in blocks of shell and in backticks."""
    lines = [line for block in fenced(text, "sh") for line in block.splitlines()]
    lines += re.findall(r"`((?:specbatch|submit-job) [^`]+)`", text)
    for line in lines:
        words = shlex.split(line, comments=True)
        if words and words[0] in APPS:
            yield words


def fenced(text: str, language: str) -> list[str]:
    """The blocks of a page that are fenced as a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


# --- PromQL ---------------------------------------------------------------------------------
_TARGET_LABELS = {"job", "instance", "worker"}
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?")
_LISTED = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


@dataclass(frozen=True)
class Selected:
    """A metric in an expression, and the labels that it is selected by."""

    name: str
    labels: frozenset[str]


def rules(name: str) -> list[dict[str, Any]]:
    """All rules of `recording.yml` or `alerts.yml`."""
    (found,) = documents(DEPLOY / "prometheus" / "rules" / name)
    return [rule for group in found["groups"] for rule in group["rules"]]


def selected(expression: str) -> Iterator[Selected]:
    """The metrics of an expression: everything of ours, and Prometheus' own `up` and `ALERTS`."""
    bare = re.sub(r'"[^"]*"', '""', expression)
    for name, matchers in _SELECTOR.findall(_LISTED.sub("", bare)):
        if "specbatch" in name or name in ("up", "ALERTS"):
            yield Selected(name, frozenset(_MATCHER.findall(matchers)))


def known_labels() -> dict[str, set[str]]:
    """Name of every series that there is: the labels it may have."""
    known = {"up": set(_TARGET_LABELS)}
    for metric in METRICS:
        labels = set(metric.labels) | _TARGET_LABELS
        if metric.kind is Kind.HISTOGRAM:
            known |= {f"{metric.name}_{part}": labels for part in ("sum", "count")}
            known[f"{metric.name}_bucket"] = labels | {"le"}
        else:
            known[metric.name] = labels
    for rule in rules("recording.yml"):
        expression = rule["expr"]
        listed = _listed(expression)
        inherited = set().union(*(known[s.name] for s in selected(expression)))
        known[rule["record"]] = listed or (inherited - _TARGET_LABELS)
    every = {label for labels in known.values() for label in labels}
    own = {"alertname", "alertstate", "severity", "during_rollout"}
    return known | {"ALERTS": own | every}


def problems_of(expression: str) -> list[str]:
    """What an expression names that nobody exports."""
    known, found = known_labels(), []
    series = list(selected(expression))
    for one in series:
        if one.name not in known:
            found.append(f"there is no series {one.name}")
        else:
            wrong = one.labels - known[one.name]
            found += [f"{one.name} has no label {label}" for label in sorted(wrong)]
    there = set().union(*(known.get(one.name, set()) for one in series))
    found += [f"no series here has a label {label}" for label in _listed(expression) - there]
    return found


def _listed(expression: str) -> set[str]:
    words = ",".join(_LISTED.findall(expression)).split(",")
    return {word.strip() for word in words} - {""}


def check_promql(expressions: list[str], folder: Path) -> None:
    """Have Prometheus parse them; variables of Grafana are filled in."""
    assert expressions
    filled = [re.sub(r"\$__(range|rate_interval)", "5m", e).replace("$", "") for e in expressions]
    entries = [{"record": f"parsed:{n}", "expr": e} for n, e in enumerate(filled)]
    file = folder / "parsed.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "parsed", "rules": entries}]}))
    done = promtool("check", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr
