"""The Prefect task in the real Prefect, with a server of its own on SQLite."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from conftest import GROUP, WAIT_SEC, Site
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.states import Cancelling
from prefect.testing.utilities import prefect_test_harness

from specbatch.jobs.dags import prefect as dags
from specbatch.jobs.dags.prefect import GaveUpError, specbatch_job

EXAMPLES = Path(__file__).parents[3] / "jobs" / "examples"
QUICK = {"poll_sec": 0.1}


@pytest.fixture(scope="session", autouse=True)
def server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=int(WAIT_SEC)):
        yield


def dies_once(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first try ends when its job is submitted; the jobs that tries waited for."""
    waited, wait = [], dags.wait

    def dying(client: Any, job_id: str, *more: Any) -> Any:
        waited.append(job_id)
        if len(waited) == 1:
            raise RuntimeError("the first try ends here")
        return wait(client, job_id, *more)

    monkeypatch.setattr(dags, "wait", dying)
    return waited


@pytest.mark.parametrize("word", ["fail", "succeed"])
def test_partial_is_what_the_user_says(site: Site, word: str) -> None:
    spec = site.spec(site.prompts(3, refused=2))

    @flow
    def night() -> Any:
        return specbatch_job(spec, on_partial=word, **QUICK)

    ended = night(return_state=True)
    (job,) = site.jobs(spec["output"]["uri"])
    assert site.client.outcome(job).state == "partial"
    assert ended.is_completed() == (word == "succeed")
    if word == "succeed":
        found = ended.result()
        assert (found["job_id"], found["rows_failed"]) == (job, 2)


def test_a_retry_of_the_task_goes_on_with_its_job(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, waited = site.spec(site.prompts(3)), dies_once(monkeypatch)

    @flow
    def night() -> Any:
        return specbatch_job.with_options(retries=1)(spec, **QUICK)

    assert night()["completions"] == 3
    assert waited == site.jobs(spec["output"]["uri"]) * 2


def test_a_retry_of_the_flow_run_goes_on_with_its_job(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, waited = site.spec(site.prompts(3)), dies_once(monkeypatch)

    @flow(retries=1)
    def night() -> Any:
        return specbatch_job(spec, **QUICK)

    assert night()["completions"] == 3
    assert waited == site.jobs(spec["output"]["uri"]) * 2


def test_another_flow_run_is_another_job(site: Site) -> None:
    prompts = site.prompts(2)
    specs = [site.spec(prompts), site.spec(prompts)]

    @flow
    def night(spec: dict[str, Any]) -> Any:
        return specbatch_job(spec, **QUICK)

    assert len({night(spec)["job_id"] for spec in specs}) == 2


def test_an_input_that_changed_between_two_tries_is_not_taken_for_the_one_before(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = site.prompts(3)
    spec = site.spec(prompts)
    wait = dags.wait
    ended: list[str] = []

    def changing(client: Any, job_id: str, *more: Any) -> Any:
        """The first try ends after its job, and the input is written again."""
        found = wait(client, job_id, *more)
        ended.append(job_id)
        if len(ended) == 1:
            Path(prompts).write_text('{"prompt": "Another story"}\n')
            raise RuntimeError("the first try ends here")
        return found

    monkeypatch.setattr(dags, "wait", changing)

    @flow
    def night() -> Any:
        return specbatch_job.with_options(retries=1)(spec, **QUICK)

    failed = night(return_state=True).result(raise_on_failure=False)
    assert isinstance(failed, GaveUpError)
    assert f"changed since it was read by job {ended[0]} of an earlier try" in str(failed)
    assert len(site.jobs(spec["output"]["uri"])) == 1


def test_what_cannot_succeed_is_not_tried_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []

    def counted(*given: Any) -> Any:
        tried.append(given)
        return as_spec(*given)

    as_spec = dags.as_spec
    monkeypatch.setattr(dags, "as_spec", counted)
    spec = site.spec(site.prompts(1)) | {"sampling": {"max_tokens": 0}}

    @flow
    def night() -> Any:
        return specbatch_job.with_options(retries=3)(spec, **QUICK)

    ended = night(return_state=True)
    assert ended.is_failed()
    assert len(tried) == 1


def test_a_job_is_cancelled_when_a_user_cancels_its_flow_run(site: Site) -> None:
    spec = site.spec(site.prompts(4 * GROUP))
    runs: list[str] = []

    @flow
    def night() -> Any:
        runs.append(str(flow_run.id))
        return specbatch_job.with_options(retries=1)(spec, **QUICK)

    beside = threading.Thread(target=lambda: night(return_state=True))
    beside.start()
    job = site.freeze_in_the_middle(spec["output"]["uri"])
    try:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(UUID(runs[0]), Cancelling(), force=True)
        site.until(lambda: site.client.poll(job).stop_reason, "the job to be cancelled")
    finally:
        site.thaw()
    beside.join(WAIT_SEC)
    assert site.client.poll(job).stop_reason == "cancelled with its task in prefect"
    assert site.end(job).state == "cancelled"
    assert site.jobs(spec["output"]["uri"]) == [job]


def test_the_example_has_a_job_for_each_day(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NIGHTLY_BUCKET", str(tmp_path))
    monkeypatch.setenv("NIGHTLY_VERIFIER", site.model)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import prefect_nightly

    for day, rows in (("2026-11-01", 3), ("2026-11-02", 4)):
        Path(site.prompts(rows)).rename(tmp_path / f"{day}.jsonl")
        assert prefect_nightly.nightly(day) > 0
        (job,) = site.jobs(str(tmp_path / "out" / day))
        assert site.client.outcome(job).completions == rows
