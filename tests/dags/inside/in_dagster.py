"""The Dagster op, asset and resource in the real Dagster, with SQLite for its storage."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jobs_in_dagster
import pytest
from conftest import GROUP, WAIT_SEC, Site
from dagster import (
    DagsterInstance,
    DagsterRunStatus,
    ReexecutionOptions,
    execute_job,
    materialize,
    reconstructable,
)
from dagster._core.errors import DagsterExecutionInterruptedError

from specbatch.jobs.client import JobClient, Ticket

EXAMPLES = Path(__file__).parents[3] / "jobs" / "examples"
FORK = get_context("fork")


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DAGSTER_HOME, where runs and events are kept."""
    folder = tmp_path_factory.mktemp("dagster")
    os.environ["DAGSTER_HOME"] = str(folder)
    os.environ["DAGSTER_DISABLE_TELEMETRY"] = "1"
    (folder / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    return folder


@pytest.fixture
def instance(home: Path) -> Any:
    assert home.is_dir()
    with DagsterInstance.get() as found:
        yield found


def tags(spec: Any) -> dict[str, str]:
    return {jobs_in_dagster.TAG: json.dumps(spec)}


def begin(name: str, spec: dict[str, Any]) -> Any:
    """A run in a process of its own, which is a child of this one."""
    process = FORK.Process(target=_execute, args=(name, spec))
    process.start()
    return process


def _execute(name: str, spec: dict[str, Any]) -> None:
    with DagsterInstance.get() as instance:
        job = reconstructable(getattr(jobs_in_dagster, name))
        with execute_job(job, instance=instance, tags=tags(spec)) as result:
            os._exit(0 if result.success else 1)


def run_of(instance: DagsterInstance, name: str) -> Any:
    """The newest run of a job."""
    return next(run for run in instance.get_runs(limit=50) if run.job_name == name)


def step_process(pid: int) -> int | None:
    """The process of the step that a run's process has started."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    return None


@pytest.mark.parametrize(
    ("word", "follows"), [("fail", None), ("succeed", "partial"), ("skip", None)]
)
def test_partial_is_what_the_user_says(
    instance: DagsterInstance, site: Site, word: str, follows: str | None
) -> None:
    spec = site.spec(site.prompts(3, refused=2))
    job = getattr(jobs_in_dagster, f"partial_{word}")
    result = job.execute_in_process(instance=instance, tags=tags(spec), raise_on_error=False)
    assert result.success == (word != "fail")
    done = [e.step_key for e in result.all_events if e.is_step_success]
    assert ("after" in done) == (follows is not None)
    if follows is not None:
        assert result.output_for_node("after") == follows
    written = [e for e in result.all_events if e.is_step_materialization]
    assert len(written) == (word == "succeed")
    if word == "fail":
        failure = result.failure_data_for_node("partial_fail")
        told = failure.user_failure_data.metadata
        assert told["specbatch/state"].value == "partial"
        assert told["specbatch/rows_failed"].value == 2
        assert failure.error.message.count("rows failed") == 1
    assert len(site.jobs(spec["output"]["uri"])) == 1


def test_the_example_has_one_job_for_each_partition_and_its_figures_as_metadata(
    instance: DagsterInstance, site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NIGHTLY_BUCKET", str(tmp_path))
    monkeypatch.setenv("NIGHTLY_VERIFIER", site.model)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import dagster_nightly

    jobs = set()
    for day, rows in (("2026-11-01", 3), ("2026-11-02", 4)):
        Path(site.prompts(rows)).rename(tmp_path / f"{day}.jsonl")
        result = materialize(
            [dagster_nightly.summaries, dagster_nightly.report],
            partition_key=day,
            instance=instance,
            resources={"specbatch": jobs_in_dagster.RESOURCES["specbatch"]},
        )
        (event,) = result.asset_materializations_for_node("summaries")
        told = {key: entry.value for key, entry in event.metadata.items()}
        outcome = site.client.outcome(told["specbatch/job_id"])
        assert event.partition == day
        assert told["dagster/row_count"] == told["specbatch/rows"] == rows
        assert told["specbatch/completion_tokens"] == outcome.completion_tokens == rows * 12
        assert told["specbatch/cost_usd"] == outcome.cost_usd > 0
        assert told["specbatch/output_uri"] == outcome.output_uri
        assert Path(told["specbatch/manifest_uri"]).is_file()
        assert Path(told["specbatch/data_uri"]).is_dir()
        jobs.add(told["specbatch/job_id"])
    assert len(jobs) == 2


def test_a_step_that_is_killed_and_retried_goes_on_with_its_job_and_pays_once(
    instance: DagsterInstance, site: Site
) -> None:
    spec = site.spec(site.prompts(4 * GROUP))
    run = begin("in_processes", spec)
    job = site.freeze_in_the_middle(spec["output"]["uri"])
    try:
        step = step_process(run.pid)
        assert step is not None
        os.kill(step, signal.SIGKILL)
        site.until(lambda: step_process(run.pid) not in (step, None), "the step's next process")
    finally:
        site.thaw()
    run.join(WAIT_SEC)
    assert run.exitcode == 0
    events = [
        record.event_log_entry.dagster_event.event_type_value
        for record in instance.get_records_for_run(run_of(instance, "in_processes").run_id).records
        if record.event_log_entry.is_dagster_event
    ]
    assert "STEP_UP_FOR_RETRY" in events
    assert site.jobs(spec["output"]["uri"]) == [job]
    outcome = site.client.outcome(job)
    assert outcome.state == "done"
    assert (outcome.completions, outcome.completion_tokens) == (4 * GROUP, 4 * GROUP * 12)


def test_a_run_that_is_killed_and_done_again_goes_on_with_its_job(
    instance: DagsterInstance, site: Site
) -> None:
    spec = site.spec(site.prompts(4 * GROUP))
    run = begin("in_one_process", spec)
    job = site.freeze_in_the_middle(spec["output"]["uri"])
    try:
        os.kill(run.pid, signal.SIGKILL)
        run.join(WAIT_SEC)
        dead = run_of(instance, "in_one_process")
        assert dead.status is DagsterRunStatus.STARTED  # until the daemon notices, as here:
        instance.report_run_failed(dead)
    finally:
        site.thaw()
    with _again(instance, "in_one_process", dead.run_id) as result:
        assert result.success
        assert result.run_id != dead.run_id
    assert site.jobs(spec["output"]["uri"]) == [job]
    assert site.client.outcome(job).completions == 4 * GROUP


def _again(instance: DagsterInstance, name: str, run_id: str) -> Any:
    return execute_job(
        reconstructable(getattr(jobs_in_dagster, name)),
        instance=instance,
        reexecution_options=ReexecutionOptions(parent_run_id=run_id),
        tags=instance.get_run_by_id(run_id).tags,
    )


def test_a_job_is_cancelled_when_a_user_ends_the_run(instance: DagsterInstance, site: Site) -> None:
    job = _interrupted(instance, site, instance.report_run_canceling)
    assert site.client.poll(job).stop_reason == "cancelled with its task in dagster"
    assert site.end(job).state == "cancelled"
    # Running it again asks for the remaining rows.
    with _again(instance, "in_one_process", run_of(instance, "in_one_process").run_id) as result:
        assert result.success
    outcome = site.client.outcome(job)
    assert (outcome.state, outcome.completions) == ("done", 4 * GROUP)


def test_a_job_goes_on_when_the_process_of_its_run_is_shut_down(
    instance: DagsterInstance, site: Site
) -> None:
    job = _interrupted(instance, site, lambda _: None)
    assert site.client.poll(job).stop_reason is None
    assert site.end(job).state == "done"


def _interrupted(instance: DagsterInstance, site: Site, before: Callable[[Any], Any]) -> str:
    """A run whose process is asked to end in the middle of its job; the job's id."""
    spec = site.spec(site.prompts(4 * GROUP))
    run = begin("in_one_process", spec)
    job = site.freeze_in_the_middle(spec["output"]["uri"])
    try:
        before(run_of(instance, "in_one_process"))
        os.kill(run.pid, signal.SIGTERM)
        run.join(WAIT_SEC)
        assert run.exitcode not in (None, 0)
    finally:
        site.thaw()
    return job


def test_a_job_is_cancelled_when_a_user_ends_the_run_while_it_is_submitted(
    instance: DagsterInstance, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes when the store has the job, and nobody here its id."""
    spec = site.spec(site.prompts(1))
    submit = JobClient.submit

    def interrupted(self: JobClient, *args: Any) -> Ticket:
        made = submit(self, *args)
        instance.report_run_canceling(run_of(instance, "partial_fail"))
        signal.raise_signal(signal.SIGINT)  # Dagster's handler raises
        return made

    monkeypatch.setattr(JobClient, "submit", interrupted)
    with contextlib.suppress(DagsterExecutionInterruptedError):
        jobs_in_dagster.partial_fail.execute_in_process(
            instance=instance, tags=tags(spec), raise_on_error=False
        )
    (job,) = site.jobs(spec["output"]["uri"])
    assert site.client.poll(job).stop_reason == "cancelled with its task in dagster"


def test_another_spec_is_another_job(instance: DagsterInstance, site: Site) -> None:
    specs = [site.spec(str(site.folder / "missing.jsonl")), site.spec(site.prompts(2))]
    result = materialize(
        [jobs_in_dagster.changing],
        instance=instance,
        tags=tags(specs),
        resources=jobs_in_dagster.RESOURCES,
    )
    assert result.success
    first, second = (site.jobs(spec["output"]["uri"]) for spec in specs)
    assert len(first) == len(second) == 1
    assert site.client.outcome(first[0]).state == "failed"
    assert site.client.outcome(second[0]).state == "done"
