"""The Helm chart: as the manifests make it, and what it renders, where there is a `helm`."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from typing import Any

import yaml
from deploy.deployed import DEPLOY, documents

CHART = DEPLOY / "helm" / "specbatch"
MAKER = runpy.run_path(str(DEPLOY / "helm" / "make.py"))
FILES: dict[str, str] = MAKER["files"]()
BASE = DEPLOY / "kubernetes" / "base"
VALUES = yaml.safe_load(FILES["values.yaml"])
HELM = shutil.which("helm")


def test_each_file_is_what_the_manifests_make() -> None:
    found = {str(p.relative_to(CHART)): p.read_text() for p in CHART.rglob("*") if p.is_file()}
    assert found == FILES, "python deploy/helm/make.py"


def test_every_value_that_a_template_names_is_there_and_each_is_used() -> None:
    templates = "".join(text for name, text in FILES.items() if name.startswith("templates/"))
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
        for name, text in FILES.items()
        if name.startswith("templates/")
        for d in _rendered(name, text)
    }
    base = [d for path in BASE.glob("*.yaml") for d in documents(path) if "metadata" in d]
    for manifest in base:
        if manifest["kind"] == "Namespace":
            continue
        found = made.pop((manifest["kind"], manifest["metadata"]["name"]))
        assert _without_ours(found) == _without_ours(manifest)
    assert not made


def test_helm_itself_renders_the_same_where_there_is_one() -> None:
    # Where helm is missing, the few functions below have to do.
    if HELM is None:
        return
    command = [HELM, "template", "specbatch", str(CHART), "--namespace", "specbatch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ours = [
        d for name, t in FILES.items() if name.startswith("templates/") for d in _rendered(name, t)
    ]
    by_name = {(d["kind"], d["metadata"]["name"]): d for d in ours}
    theirs = [d for d in yaml.safe_load_all(done.stdout) if d]
    assert {(d["kind"], d["metadata"]["name"]): d for d in theirs} == by_name


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
    if said.endswith("| quote") or said.startswith("toJson"):
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
