"""Makes the Helm chart in `specbatch/` from the manifests of `deploy/kubernetes/base`.

    python deploy/helm/make.py

The manifests stay the one source, with their comments. A value of the chart is a place in them: its
default is what stands there, so that the chart without values renders what kustomize does. Only
four things differ. The namespace is the release's. `migrate` is a hook, because a job cannot be
changed. The volume of the models stays when the release is uninstalled. Where Kubernetes takes only
texts, numbers and booleans among the values become texts.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
BASE = HERE.parent / "kubernetes" / "base"
CHART = HERE / "specbatch"
VERSION = "0.1.0"
LABELS = {"app.kubernetes.io/name": "specbatch", "app.kubernetes.io/part-of": "specbatch"}
HOOK = {
    # An upgrade changes no worker before the store is ready. An install has no settings before.
    "helm.sh/hook": "post-install,pre-upgrade",
    "helm.sh/hook-delete-policy": "before-hook-creation",
}
SWITCHES = {  # by kind: the value that leaves it out
    "ScaledObject": ("keda", "workers are scaled by KEDA, which must be installed"),
    "TriggerAuthentication": ("keda", ""),
    "NetworkPolicy": ("networkPolicy", "who reaches workers, and whom they reach"),
}
_WHOLE = re.compile(r"'@@(.+?)@@'")  # a mark that is a whole value, as PyYAML writes it
_WITHIN = re.compile(r"%%(.+?)%%")
_IN_SQL = """replace "'" "''\""""
_TEXTS = """{{- /* A map as JSON, each of its values as a text. */ -}}
{{- define "texts" -}}
{{- $texts := dict -}}
{{- range $key, $value := . -}}
{{- $_ := set $texts $key (kindIs "string" $value | ternary $value (toJson $value)) -}}
{{- end -}}
{{- toJson $texts -}}
{{- end -}}
"""
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Value:
    """One value: its name, what it is, and its places as (kind, name, path)."""

    name: str
    says: str
    places: tuple[tuple[str, str, str], ...]


_WORKER, _SCALER = "Deployment", "ScaledObject"
_ARGS = "spec.template.spec.containers.0.args"
_RESOURCES = "spec.template.spec.containers.0.resources"
_QUERY = "spec.triggers.0.metadata.query"
VALUES = (
    Value("settings", "settings of all workers", (("ConfigMap", "specbatch-settings", "data"),)),
    Value("schedules", "a schedule file each", (("ConfigMap", "specbatch-schedules", "data"),)),
    Value(
        "models.storage",
        "of the volume with the model folders",
        (("PersistentVolumeClaim", "models", "spec.resources.requests.storage"),),
    ),
    Value(
        "verify.verifier",
        "as jobs name it",
        ((_WORKER, "verify", f"{_ARGS}.3"), (_SCALER, "verify", _QUERY)),
    ),
    Value(
        "verify.proposer", "draft model beside the verifier", ((_WORKER, "verify", f"{_ARGS}.5"),)
    ),
    Value(
        "verify.kvCacheMib",
        "of one worker",
        ((_WORKER, "verify", "spec.template.spec.containers.0.env.1.value"),),
    ),
    Value("verify.resources", "of one worker", ((_WORKER, "verify", _RESOURCES),)),
    Value("verify.least", "fewest workers", ((_SCALER, "verify", "spec.minReplicaCount"),)),
    Value("verify.most", "most workers", ((_SCALER, "verify", "spec.maxReplicaCount"),)),
    Value(
        "verify.night",
        "when one worker stays up even without work",
        ((_SCALER, "verify", "spec.triggers.1.metadata"),),
    ),
    Value(
        "propose.proposer",
        "as jobs name it",
        ((_WORKER, "propose", f"{_ARGS}.3"), (_SCALER, "propose", _QUERY)),
    ),
    Value("propose.resources", "of one worker", ((_WORKER, "propose", _RESOURCES),)),
    Value("propose.most", "most workers", ((_SCALER, "propose", "spec.maxReplicaCount"),)),
    Value("ingest.resources", "of one worker", ((_WORKER, "ingest", _RESOURCES),)),
    Value("ingest.most", "most workers", ((_SCALER, "ingest", "spec.maxReplicaCount"),)),
    Value("record.resources", "of one worker", ((_WORKER, "record", _RESOURCES),)),
    Value(
        "record.graceSec",
        "for publications, which end before the worker does",
        ((_WORKER, "record", "spec.template.spec.terminationGracePeriodSeconds"),),
    ),
    Value("record.most", "most workers", ((_SCALER, "record", "spec.maxReplicaCount"),)),
    Value(
        "warmGpus",
        "nodes kept warm beside those at work",
        ((_WORKER, "warm-gpu", "spec.replicas"),),
    ),
)


def main() -> int:
    for name, content in files().items():
        path = CHART / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return 0


def files() -> dict[str, str]:
    """The chart's files by name."""
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    images = {one["name"]: f"{one['newName']}:{one['newTag']}" for one in kustomization["images"]}
    by_file = {
        name: list(yaml.safe_load_all((BASE / name).read_text()))
        for name in kustomization["resources"]
    }
    documents = [document for found in by_file.values() for document in found]
    defaults = {value.name: _take(value, documents) for value in VALUES}
    for document in documents:
        _label(document)
        _take_images(document, images)
    made = {
        f"templates/{name}": "".join(_template(one) for one in found if one["kind"] != "Namespace")
        for name, found in by_file.items()
    }
    made["templates/_texts.tpl"] = _TEXTS
    made["Chart.yaml"] = _chart()
    made["values.yaml"] = "".join(_values_file(defaults, images))
    return made


def _take(value: Value, documents: list[Document]) -> Any:
    """The value's default; its places are marked. A place that holds more text keeps the rest."""
    default = None
    for kind, name, path in value.places:
        (node,) = (d for d in documents if (d["kind"], d["metadata"]["name"]) == (kind, name))
        *way, last = (int(key) if key.isdigit() else key for key in path.split("."))
        for key in way:
            node = node[key]
        found = node[last]
        if default is None:
            default = found
            node[last] = f"@@{_expression(value.name, found)}@@"
        elif str(default) in found:
            node[last] = found.replace(str(default), f"%%.Values.{value.name} | {_IN_SQL}%%")
        else:
            raise ValueError(f"{kind} {name} does not hold {default!r} at {path}")
    return default


def _expression(name: str, default: Any) -> str:
    if isinstance(default, str):
        return f".Values.{name} | quote"
    if isinstance(default, int):
        return f"int .Values.{name}"
    if all(isinstance(value, str) for value in default.values()):
        return f'include "texts" .Values.{name}'
    return f"toJson .Values.{name}"  # JSON is YAML at any indentation


def _take_images(document: Document, images: Mapping[str, str]) -> None:
    pod = document.get("spec", {}).get("template", {}).get("spec", {})
    for container in pod.get("containers", ()):
        if container["image"] in images:
            short = container["image"].removeprefix("specbatch-")
            container["image"] = f"@@.Values.images.{short} | quote@@"


def _label(document: Document) -> None:
    metadata = document["metadata"]
    metadata["labels"] = {**metadata.get("labels", {}), **LABELS}
    if document["kind"] == "Job":
        metadata["annotations"] = HOOK
    if document["kind"] == "PersistentVolumeClaim":
        metadata["annotations"] = {"helm.sh/resource-policy": "keep"}  # the models outlive it
    if "template" in document.get("spec", {}):
        inner = document["spec"]["template"]["metadata"]
        inner["labels"] = {**inner["labels"], **LABELS}


def _template(document: Document) -> str:
    text = yaml.safe_dump(document, sort_keys=False, width=10_000)
    for mark in (_WHOLE, _WITHIN):
        text = mark.sub(lambda found: "{{ " + found[1] + " }}", text)
    if document["kind"] in SWITCHES:
        switch = SWITCHES[document["kind"]][0]
        return f"{{{{- if .Values.{switch} }}}}\n---\n{text}{{{{- end }}}}\n"
    return f"---\n{text}"


def _chart() -> str:
    said = {
        "apiVersion": "v2",
        "name": "specbatch",
        "description": "Batch generation with speculative decoding, output bit for bit",
        "type": "application",
        "version": VERSION,
        "appVersion": VERSION,
    }
    return yaml.safe_dump(said, sort_keys=False)


def _values_file(defaults: Mapping[str, Any], images: Mapping[str, str]) -> Iterator[str]:
    yield "# Made by ../make.py of ../../kubernetes/base: change that, or set your own values.\n"
    yield "# Install without --wait and --atomic: workers wait for `migrate`, which runs last.\n"
    yield "images:\n"
    for name, image in images.items():
        yield f"  {name.removeprefix('specbatch-')}: {image}\n"
    for switch, says in SWITCHES.values():
        if says:
            yield f"{switch}: true # {says}\n"
    section = ""
    for value in VALUES:
        outer, _, inner = value.name.rpartition(".")
        if outer and outer != section:
            yield f"{outer}:\n"
        section = outer
        indent = "  " if outer else ""
        yield f"{indent}# {value.says}\n{indent}{inner}: {json.dumps(defaults[value.name])}\n"


if __name__ == "__main__":
    sys.exit(main())
