"""A local job reaches OpenLineage's endpoint before its command ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.openlineage import unset
from support.openlineage_rules import checked
from support.webhooks import Receiver, receiving


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with unset(), receiving() as server:
        monkeypatch.setenv("OPENLINEAGE_URL", server.url.removesuffix("/hook"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server


def test_a_local_job_is_told_before_the_command_ends(
    cli: Any, job: Any, receiver: Receiver
) -> None:
    parent = "default/nightly.load/01939f2e-7c1e-7d0b-8a55-3c1b2f6f9f10"
    done = cli("submit-job", *job, "--local", "--depth", 2, "--lineage-parent", parent, "--json")
    assert done.code == 0, done.err
    start, end = (checked(json.loads(body)) for _, body in receiver.got)
    assert (start["eventType"], end["eventType"]) == ("START", "COMPLETE")
    assert start["run"]["runId"] == end["run"]["runId"]
    assert end["run"]["facets"]["parent"]["job"]["name"] == "nightly.load"
    facet = end["run"]["facets"]["specbatch_generation"]
    assert facet["job"]["id"] == done.json["job"]
    assert facet["models"]["proposer"]["sha256"]
    assert 0 <= facet["tokens"]["accepted"] <= facet["tokens"]["proposed"] > 0
    schema = end["inputs"][0]["facets"]["schema"]["fields"]
    assert {"name": "prompt", "type": "string"}.items() <= schema[1].items()
    assert end["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] == 12
    shown = cli("show", done.json["job"]).out
    assert "lineage, started: sent" in shown
    assert "lineage, done: sent" in shown


def test_a_local_job_ends_well_where_the_endpoint_is_away(
    cli: Any, job: Any, receiver: Receiver
) -> None:
    receiver.answers = [404] * 9
    done = cli("submit-job", *job, "--local", "--json")
    assert done.code == 0, done.err
    assert "lineage, done: attempt 1 failed, another follows" in cli("show", done.json["job"]).out
    assert cli("notify").out == "sent 0 notifications\n", "it is not due yet"


def test_a_parent_that_names_no_run_is_refused(cli: Any, job: Any) -> None:
    done = cli("submit-job", *job, "--local", "--lineage-parent", "nightly")
    assert done.code == 2
    assert "NAMESPACE/JOB NAME/RUN ID" in done.err
