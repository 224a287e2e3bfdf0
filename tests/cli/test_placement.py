"""What commands say of jobs whose rows may not be everywhere."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from contracts.shorthand import F32, ingest, serving
from ledger.builders import JOB, new_job

from specbatch.jobs.running.here import check_place
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.schemas.errors import SpecError, UsageError
from specbatch.schemas.records import Stage
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import load_spec
from specbatch.schemas.timekeeping import Device, NewSession

SPEC: dict[str, Any] = {"input": {"uri": "in"}, "output": {"uri": "out"}, "verifier": "owner/big"}


def test_show_says_for_which_region_a_job_waits(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'placed.db'}"
    monkeypatch.setenv("SPECBATCH_DATABASE_URL", url)
    store = open_store(url)
    ingest(store, spec={**new_job().spec, "placement": {"regions": ["eu"], "spot": False}})
    far = Device("cpu", "us", "spot", 1, "far")
    store.begin_session(NewSession("far", "far", far, 0, serving(F32)))
    store.close()
    waits = "waits for a worker in region eu not on spot to verify; alive: us on spot"
    assert waits in cli("show", JOB).out
    assert cli("show", JOB, "--json").json["waits_for"] == waits


def test_a_worker_s_store_knows_where_the_worker_is(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'placed.db'}"
    with closing(open_store(url)) as store:
        store.create_job(new_job(spec={**new_job().spec, "placement": {"regions": ["eu"]}}))
    for region, may in (("us", False), ("eu", True)):
        settings = Settings(database_url=url, region=region)
        with closing(make_store(settings, "host:1")) as worker:
            work = worker.claim_job(JOB, Stage.INGEST, "host:1", 60.0)
        assert (work is not None) is may


@pytest.mark.parametrize(
    ("placement", "site", "is_refused"),
    [
        ({}, {}, False),
        ({"regions": "local, eu"}, {}, False),
        ({"regions": ["eu"]}, {}, True),
        ({"regions": ["eu"]}, {"region": "eu"}, False),
        ({"spot": False}, {"tenure": "spot"}, True),
    ],
)
def test_a_local_run_refuses_rows_that_may_not_be_here(
    placement: dict[str, Any], site: dict[str, Any], is_refused: bool
) -> None:
    spec, settings = load_spec({**SPEC, "placement": placement}), Settings(**site)
    if not is_refused:
        check_place(settings, spec)
        return
    with pytest.raises(UsageError, match=r"the job's rows may only be .*, and this process is in"):
        check_place(settings, spec)


@pytest.mark.parametrize("name", ["e u", 'e"u', "", "a/b"])
def test_a_region_that_can_be_no_worker_s_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=r"placement\.regions"):
        load_spec({**SPEC, "placement": {"regions": [name]}})


@pytest.mark.parametrize("name", ["e u", "eu,us", 'e"u', "e\\u", "", "a/b", "eu\n", "e" * 65])
def test_a_worker_is_in_no_region_that_a_job_cannot_name(name: str) -> None:
    with pytest.raises(ValueError, match="no job could name this region"):
        Settings(region=name)
    with pytest.raises(SpecError, match=r"placement\.regions"):
        load_spec({**SPEC, "placement": {"regions": [name]}})
