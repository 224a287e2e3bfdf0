"""`--verification`: what a job says of it, and what a worker without a draft model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from specbatch.pipeline.bootstrap import make_client
from specbatch.schemas.errors import SpecError
from specbatch.schemas.records import Verification
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec, load_spec
from specbatch.workers.app import make_enqueue
from specbatch.workers.lifecycle import embedded
from support.models import TinyPair

SPEC: dict[str, Any] = {
    "input": {"uri": "prompts.parquet"},
    "output": {"uri": "out"},
    "verifier": "v",
    "proposer": "p",
}


def spec_of(**speculation: object) -> JobSpec:
    return load_spec(SPEC | {"speculation": speculation})


def test_coupled_is_the_default() -> None:
    assert load_spec(SPEC).speculation.verification is Verification.COUPLED


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_what_cannot_work_is_refused(verification: str) -> None:
    for depth in ("off", 0):
        with pytest.raises(SpecError, match="needs drafts, and depth is off"):
            spec_of(verification=verification, depth=depth)
    with pytest.raises(SpecError, match="which pre-generated drafts do not carry"):
        spec_of(verification=verification, pregenerate=True)
    with pytest.raises(SpecError, match=f"verification {verification} needs a draft model"):
        load_spec(SPEC | {"proposer": None, "speculation": {"verification": verification}})


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_no_group_is_drafted_ahead_for_a_ratio_test(verification: str) -> None:
    assert any(spec_of().proposes(index) for index in range(16))
    assert not any(spec_of(verification=verification).proposes(index) for index in range(16))


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_the_output_and_the_summary_say_how_it_was_verified(
    cli: Any, job: Any, folder: Path, verification: str
) -> None:
    flags = ["--local", "--verification", verification, "--temperature", 0.8, "--depth", 2]
    done = cli("submit-job", *job, *flags)
    assert done.code == 0
    assert f"{verification}: outputs depend on the drafts" in done.out
    manifest = json.loads((folder / "out" / "manifest.json").read_text())
    assert manifest["info"]["verification"] == verification
    table = pq.read_table(folder / "out" / "data/part-00000.parquet")
    assert all(rate is not None for rate in table.column("acceptance_rate").to_pylist())


def test_a_coupled_job_says_so_in_its_manifest_only(cli: Any, job: Any, folder: Path) -> None:
    done = cli("submit-job", *job, "--local")
    assert "outputs depend" not in done.out
    manifest = json.loads((folder / "out" / "manifest.json").read_text())
    assert manifest["info"]["verification"] == "coupled"


def test_a_job_waits_for_the_draft_model_that_its_outputs_depend_on(
    folder: Path, tiny_pair: TinyPair
) -> None:
    settings = Settings(workspace=str(folder / "workspace"))
    models = {"verifier": str(tiny_pair.verifier), "proposer": str(tiny_pair.draft)}
    values = SPEC | models | {"speculation": {"verification": "rejection"}}
    with embedded(settings, str(tiny_pair.verifier), None) as (app, worker):
        client = make_client(settings, make_enqueue(app), worker.store)
        submitted, _ = client.submit(load_spec(values).resolved(folder))
        waits = ""
        for progress in client.follow(submitted.job_id, 0.1, 120):
            waits = str(client.waits_for(submitted.job_id, 60.0))
            # It may be in the middle of its start, when it takes no messages yet.
            if "draft model" in waits and progress.ingest_done:
                break
        assert worker.store.failed_groups(submitted.job_id) == []
    assert waits.startswith("waits for a worker with draft model fingerprint ")
    assert waits.endswith("; alive: none with a draft model (--proposer)")
