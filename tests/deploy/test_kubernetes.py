"""The manifests, beside Kubernetes' schemas, the program, and a real store."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import psycopg
import pytest
import yaml
from contracts.shorthand import claim, claim_job
from deploy.deployed import DEPLOY, SETTINGS, check_command, documents
from ledger.builders import JOB, new_group, new_job, position

from specbatch.pipeline.ledger.sql import migrate
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.records import Stage
from specbatch.schemas.sql_roles import TABLES
from specbatch.workers.lifecycle import PATIENCE_SEC
from support.servers import PrivatePostgres

FOLDER = DEPLOY / "kubernetes"
BASE = FOLDER / "base"
(KUSTOMIZATION,) = documents(BASE / "kustomization.yaml")
FILES = [BASE / name for name in KUSTOMIZATION["resources"]]
MANIFESTS = [document for file in FILES for document in documents(file)]
IDS = [f"{m['kind']}-{m['metadata']['name']}" for m in MANIFESTS]
OWN_KINDS = ("ScaledObject", "TriggerAuthentication")
KINDS = ("ingest", "propose", "verify", "record")


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {m["metadata"]["name"]: m for m in MANIFESTS if m["kind"] == kind}


PODS: dict[str, dict[str, Any]] = {
    name: m["spec"]["template"]["spec"]
    for kind in ("Deployment", "Job")
    for name, m in of_kind(kind).items()
}
OURS = {name: pod for name, pod in PODS.items() if name != "warm-gpu"}
SCALED = of_kind("ScaledObject")


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return dict(only)


def test_every_file_is_a_resource() -> None:
    assert {file.name for file in FILES} == {p.name for p in BASE.glob("*.yaml")} - {
        "kustomization.yaml"
    }


@pytest.mark.parametrize("manifest", MANIFESTS, ids=IDS)
def test_manifests_follow_kubernetes_schemas(manifest: dict[str, Any]) -> None:
    if manifest["kind"] in OWN_KINDS:  # KEDA's: held to what its documentation says, below
        assert manifest["apiVersion"] == "keda.sh/v1alpha1"
        assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
        return
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_kustomize_puts_them_together_where_there_is_one() -> None:
    # Without kubectl the labels, images and namespace are as the file says, and not tried.
    kubectl = shutil.which("kubectl")
    if kubectl:
        words = [kubectl, "kustomize", str(BASE)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        made = list(yaml.safe_load_all(done.stdout))
        assert len(made) == len(MANIFESTS)
        images = set(re.findall(r"image: (\S+)", done.stdout))
        assert all(re.search(r":v?\d+\.\d+", image) for image in images), images
    assert KUSTOMIZATION["namespace"] in of_kind("Namespace")


def test_images_are_pinned_by_the_kustomization() -> None:
    pinned = {image["name"]: image["newTag"] for image in KUSTOMIZATION["images"]}
    for name, pod in PODS.items():
        image = container(pod)["image"]
        assert image in pinned or re.search(r":\d+\.\d+", image), name
    assert set(pinned) == {container(pod)["image"] for pod in OURS.values()}


@pytest.mark.parametrize("name", OURS)
def test_pods_run_commands_with_settings_that_there_are(name: str) -> None:
    only = container(OURS[name])
    check_command(["specbatch", *only["args"]])
    (settings,) = [m for n, m in of_kind("ConfigMap").items() if n == "specbatch-settings"]
    variables = {*settings["data"], *(entry["name"] for entry in only.get("env", []))}
    secrets = {d["metadata"]["name"]: d for d in documents(FOLDER / "secrets.example.yaml")}
    for source in only["envFrom"]:
        if "secretRef" in source:
            variables |= set(secrets[source["secretRef"]["name"]]["stringData"])
        else:
            assert source["configMapRef"]["name"] in of_kind("ConfigMap")
    assert {v for v in variables if v.startswith("SPECBATCH_")} <= SETTINGS


@pytest.mark.parametrize("name", PODS)
def test_pods_are_nobody_special_and_may_nothing(name: str) -> None:
    pod, only = PODS[name], container(PODS[name])
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert only["resources"]["limits"]["memory"]
    mounted = {mount["name"] for mount in only.get("volumeMounts", [])}
    assert mounted == {volume["name"] for volume in pod.get("volumes", [])}


def test_processors_and_gpus_have_pools_of_their_own() -> None:
    def pool(name: str) -> str:
        return str(PODS[name]["nodeSelector"]["specbatch.example.com/pool"])

    assert {name: pool(name) for name in PODS} == {
        name: "gpu" if name in ("verify", "warm-gpu") else "cpu" for name in PODS
    }
    for name, pod in PODS.items():
        tolerated = {t["key"]: t.get("value") for t in pod["tolerations"]}
        assert tolerated["specbatch.example.com/pool"] == pool(name)
        asks_for_gpu = "nvidia.com/gpu" in container(pod)["resources"]["limits"]
        assert asks_for_gpu is (pool(name) == "gpu") is ("nvidia.com/gpu" in tolerated)
    placeholder, verifier = container(PODS["warm-gpu"]), container(PODS["verify"])
    assert placeholder["resources"]["requests"] == verifier["resources"]["requests"]
    assert of_kind("PriorityClass")[PODS["warm-gpu"]["priorityClassName"]]["value"] < 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_has_probes_a_budget_and_the_time_to_end(kind: str) -> None:
    only = container(PODS[kind])
    (port,) = only["ports"]
    settings = of_kind("ConfigMap")["specbatch-settings"]["data"]
    assert port["containerPort"] == int(settings["SPECBATCH_METRICS_PORT"])
    assert settings["SPECBATCH_METRICS_ADDRESS"] == "0.0.0.0", "probes come from outside the pod"
    # Liveness must not depend on the store: that would restart all workers with the database.
    assert set(only["livenessProbe"]) & {"httpGet", "exec", "tcpSocket"} == {"tcpSocket"}
    assert only["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    assert "startupProbe" in only
    budget = of_kind("PodDisruptionBudget")[kind]["spec"]
    assert budget["selector"] == of_kind("Deployment")[kind]["spec"]["selector"]
    assert PODS[kind]["terminationGracePeriodSeconds"] >= PATIENCE_SEC + 45


def test_selectors_find_the_pods_and_the_scaler_has_the_say_of_how_many() -> None:
    for name, deployment in of_kind("Deployment").items():
        spec = deployment["spec"]
        assert spec["selector"]["matchLabels"].items() <= (
            spec["template"]["metadata"]["labels"].items()
        )
        assert ("replicas" in spec) is (name not in SCALED)
    assert of_kind("Deployment")["scheduler"]["spec"]["replicas"] == 1


def test_scalers_are_as_keda_has_them() -> None:
    assert set(SCALED) == set(KINDS)
    fields = {
        *("scaleTargetRef", "pollingInterval", "cooldownPeriod", "minReplicaCount"),
        *("maxReplicaCount", "advanced", "triggers"),
    }
    keys = {
        "postgresql": {"query", "targetQueryValue", "activationTargetQueryValue"},
        "cron": {"timezone", "start", "end", "desiredReplicas"},
    }
    for name, scaled in SCALED.items():
        spec = scaled["spec"]
        assert set(spec) <= fields
        assert spec["scaleTargetRef"]["name"] == name
        assert 0 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
        for trigger in spec["triggers"]:
            assert set(trigger["metadata"]) <= keys[trigger["type"]]
            assert all(
                isinstance(v, str) for v in trigger["metadata"].values()
            )  # KEDA refuses others
            if trigger["type"] == "postgresql":
                assert trigger["authenticationRef"]["name"] in of_kind("TriggerAuthentication")
    # Somebody always sweeps and is scraped; somebody is warm at night.
    assert SCALED["record"]["spec"]["minReplicaCount"] >= 1
    assert "cron" in {trigger["type"] for trigger in SCALED["verify"]["spec"]["triggers"]}


def test_scalers_ask_for_the_models_that_their_workers_serve() -> None:
    for name in ("verify", "propose"):
        flag = {"verify": "--verifier", "propose": "--proposer"}[name]
        arguments = container(PODS[name])["args"]
        model = arguments[arguments.index(flag) + 1]
        assert f"'{model}'" in query(name)


def query(name: str) -> str:
    (found,) = [t for t in SCALED[name]["spec"]["triggers"] if t["type"] == "postgresql"]
    return str(found["metadata"]["query"])


# --- the scalers' queries, on a real store ----------------------------------------------------
MODELS = {"verifier": "/models/verifier", "proposer": "/models/draft"}


@pytest.fixture(scope="module")
def store_url(postgres_server: PrivatePostgres) -> Iterator[str]:
    url = postgres_server.create_database()
    migrate.upgrade(url)
    yield url
    postgres_server.drop_database(url)


@pytest.fixture(scope="module")
def scaler(store_url: str) -> Iterator[psycopg.Connection]:
    """Logged in as the scaler does, with the rights of `autoscaler-role.sql` and no others."""
    with psycopg.connect(store_url, autocommit=True) as owner:
        owner.execute((FOLDER / "autoscaler-role.sql").read_bytes())
        owner.execute((FOLDER / "autoscaler-role.sql").read_bytes())  # may be run again
        with psycopg.connect(store_url, user="specbatch_autoscaler", autocommit=True) as found:
            yield found
        owner.execute("DROP OWNED BY specbatch_autoscaler")
        owner.execute("DROP ROLE specbatch_autoscaler")


def asked(scaler: psycopg.Connection) -> dict[str, int]:
    found = {}
    for name in KINDS:
        row = scaler.execute(query(name).encode()).fetchone()
        assert row is not None
        found[name] = int(row[0])
    return found


def test_scalers_count_what_is_ready_and_what_is_leased(
    store_url: str, scaler: psycopg.Connection
) -> None:
    def wanted(**counts: int) -> dict[str, int]:
        return dict.fromkeys(KINDS, 0) | counts

    store = migrate.open_store(store_url)
    assert isinstance(store, SqlStore)
    try:
        assert asked(scaler) == wanted()
        store.create_job(new_job(**MODELS))
        assert asked(scaler) == wanted(ingest=1)
        lease = claim_job(store, Stage.INGEST).lease
        assert asked(scaler) == wanted(ingest=1)  # leased, and still wanted
        groups = [new_group(n, first_stage=Stage.VERIFY) for n in (0, 1)]
        store.add_groups(
            lease, [*groups, new_group(2, first_stage=Stage.PROPOSE)], [], 12, position(12)
        )
        store.finish_ingest(lease, 12, {})
        assert asked(scaler) == wanted(verify=2, propose=1)
        held = claim(store, 0)
        assert held.lease.group_index == 0
        assert asked(scaler) == wanted(verify=2, propose=1)
        store.request_cancel(JOB)
        assert asked(scaler)["verify"] >= 1  # what is held goes on to its end
    finally:
        store.close()


def test_the_scaler_reads_counts_and_nothing_else(scaler: psycopg.Connection) -> None:
    for table in TABLES:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            scaler.execute(f"SELECT * FROM {table} LIMIT 1".encode())
    for column in ("spec", "tenant", "name", "error", "idempotency_key", "output_uri"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            scaler.execute(f"SELECT {column} FROM jobs".encode())
    for statement in ("UPDATE groups SET stage = 'done'", "DELETE FROM jobs"):
        with pytest.raises(
            (psycopg.errors.InsufficientPrivilege, psycopg.errors.ReadOnlySqlTransaction)
        ):
            scaler.execute(statement.encode())
