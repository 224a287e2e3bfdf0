"""The Helm chart: as the manifests make it, and what it renders, where there is a `helm`."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.deployed import DEPLOY, documents

CHART = DEPLOY / "helm" / "specbatch"
MAKER = runpy.run_path(str(DEPLOY / "helm" / "make.py"))
FILES: dict[str, str] = MAKER["files"]()
MANIFESTS = {name: text for name, text in FILES.items() if name.endswith(".yaml") and "/" in name}
BASE = DEPLOY / "kubernetes" / "base"
VALUES = yaml.safe_load(FILES["values.yaml"])
HELM = shutil.which("helm")


def test_each_file_is_what_the_manifests_make() -> None:
    found = {str(p.relative_to(CHART)): p.read_text() for p in CHART.rglob("*") if p.is_file()}
    assert found == FILES, "python deploy/helm/make.py"


def test_every_value_that_a_template_names_is_there_and_each_is_used() -> None:
    templates = "".join(MANIFESTS.values())
    named = set(re.findall(r"\.Values\.([\w.]+)", templates))
    for name in named:
        found: Any = VALUES
        for key in name.split("."):
            found = found[key]
        assert found is not None, name
    given = {
        name if name in named else f"{name}.{inner}"
        for name, value in VALUES.items()
        for inner in (value if isinstance(value, dict) else [name])
    }
    assert given == named


def test_with_its_own_values_the_chart_renders_the_manifests() -> None:
    made = {
        (d["kind"], d["metadata"]["name"]): d
        for name, text in MANIFESTS.items()
        for d in _rendered(name, text)
    }
    base = [d for path in BASE.glob("*.yaml") for d in documents(path) if "metadata" in d]
    for manifest in base:
        if manifest["kind"] == "Namespace":
            continue
        found = made.pop((manifest["kind"], manifest["metadata"]["name"]))
        assert _without_ours(found) == _without_ours(manifest)
    assert not made


def test_a_store_is_migrated_before_an_upgrade_and_after_an_install() -> None:
    made = [d for name, text in MANIFESTS.items() for d in _rendered(name, text)]
    hooks = {
        d["metadata"]["name"]: d["metadata"]["annotations"]["helm.sh/hook"]
        for d in made
        if "helm.sh/hook" in d["metadata"].get("annotations", {})
    }
    # Workers wait for it: an upgrade that waits for them could not end if it came after them. What
    # it needs is no hook, so an install has it only afterwards.
    assert hooks == {"migrate": "post-install,pre-upgrade"}


def test_helm_itself_renders_the_same() -> None:
    ours = [d for name, text in MANIFESTS.items() for d in _rendered(name, text)]
    assert _by_helm() == {(d["kind"], d["metadata"]["name"]): d for d in ours}


def test_a_number_or_a_boolean_among_texts_becomes_a_text(tmp_path: Path) -> None:
    settings = {"SPECBATCH_LEASE_SEC": 90, "SPECBATCH_KV": 10_000_000, "SPECBATCH_ON": True}
    values = {"settings": settings, "verify": {"night": {"desiredReplicas": 2}}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(values))
    made = _by_helm("--values", str(tmp_path / "own.yaml"))
    (data,) = (d["data"] for d in made.values() if d["metadata"]["name"] == "specbatch-settings")
    assert {key: data[key] for key in settings} == {
        "SPECBATCH_LEASE_SEC": "90",
        "SPECBATCH_KV": "10000000",
        "SPECBATCH_ON": "true",
    }
    assert data["SPECBATCH_LOG_FORMAT"] == "json", "others keep what they were"
    clock = made["ScaledObject", "verify"]["spec"]["triggers"][1]["metadata"]
    assert clock == {**VALUES["verify"]["night"], "desiredReplicas": "2"}


def test_every_map_of_texts_stays_one() -> None:
    # The same where there is no helm.
    for place in ("settings", "schedules", "verify.night"):
        named = [text for text in MANIFESTS.values() if f" .Values.{place} " in text]
        assert named, place
        assert all(f'{{{{ include "texts" .Values.{place} }}}}' in text for text in named)


def _by_helm(*options: str) -> dict[tuple[str, str], dict[str, Any]]:
    """What `helm template` makes of the chart, by kind and name."""
    if HELM is None:
        pytest.skip("there is no `helm` on this machine")
    command = [HELM, "template", "specbatch", str(CHART), "--namespace", "specbatch", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = [d for d in yaml.safe_load_all(done.stdout) if d]
    return {(d["kind"], d["metadata"]["name"]): d for d in made}


def _rendered(name: str, text: str) -> list[dict[str, Any]]:
    """A template with the chart's own values: the few functions that `make.py` uses."""
    text = re.sub(r"\{\{- (if \.Values\.\w+|end) \}\}\n", "", text)
    text = re.sub(r"\{\{ (.+?) \}\}", lambda mark: _value(name, mark[1]), text)
    return list(yaml.safe_load_all(text))


def _value(name: str, said: str) -> str:
    (path,) = re.findall(r"\.Values\.([\w.]+)", said)
    found: Any = VALUES
    for key in path.split("."):
        found = found[key]
    if said.endswith("| quote") or said.startswith(("toJson", 'include "texts"')):
        return str(MAKER["json"].dumps(found))
    assert said.startswith("int ") or "| replace" in said, f"{name}: {said}"
    return str(found).replace("'", "''")


def _without_ours(manifest: dict[str, Any]) -> dict[str, Any]:
    """Without what kustomize, or the script in its place, adds."""
    text = yaml.safe_dump(manifest)
    text = re.sub(r"image: specbatch:\S+-(cpu|cuda)", r"image: specbatch-\1", text)
    found: dict[str, Any] = yaml.safe_load(text)
    found["metadata"].pop("annotations", None)
    inner = found.get("spec", {}).get("template", {}).get("metadata", {})
    for place in (found["metadata"], inner):
        labels = {k: v for k, v in place.pop("labels", {}).items() if k not in MAKER["LABELS"]}
        place |= {"labels": labels} if labels else {}
    return found
