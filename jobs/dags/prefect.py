"""Prefect: a task that runs one job, however often Prefect tries it.

    @flow
    def nightly(day: str) -> None:
        outcome = specbatch_job.with_options(retries=3, retry_delay_seconds=60)({
            "input": {"uri": f"s3://bucket/{day}/prompts.parquet"},
            "output": {"uri": f"s3://bucket/{day}/summaries"},
            "verifier": "llama-70b",
        })

A retry of the task or of its flow run resumes the job. A new flow run is a new job.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.logging import get_run_logger
from prefect.runtime import flow_run, task_run

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.client import JobClient, Outcome, Spec, as_spec, open_client
from specbatch.jobs.dags.attaching import (
    Place,
    Verdict,
    attach,
    cancel_with_task,
    judge,
    remedy,
    wait,
    with_input,
)
from specbatch.schemas.errors import UsageError
from specbatch.schemas.spec import JobSpec

_ENDED_BY_A_USER = (StateType.CANCELLING, StateType.CANCELLED)


class JobFailedError(Exception):
    """The job ended in a way that fails its task; another try may succeed."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"{outcome.in_words}; {remedy(outcome)}")
        self.outcome = outcome.as_json()


class GaveUpError(Exception):
    """No other try can succeed."""


class FlowCancelledError(GaveUpError):
    """A user cancelled the flow run, and the job with it."""


def may_succeed(_task: Any, _task_run: Any, state: Any) -> bool:
    """Whether another try can succeed: the task's `retry_condition_fn`."""
    return not isinstance(state.data, GaveUpError)


def run_job(
    spec: Mapping[str, Any] | str,
    *,
    on_partial: str = "fail",
    settings: Mapping[str, Any] | None = None,
    base: str = "",
    poll_sec: float = 15.0,
) -> dict[str, Any]:
    """Submit the job, or resume that of an earlier try, and wait for its end; its outcome.

    `spec`: a mapping, or a spec file's path. `on_partial`: `fail`, or `succeed` with a warning,
    when some rows failed. `settings` by their names win over the environment's. Relative paths are
    of `base`, or of the working folder. Raises `JobFailedError`, and `GaveUpError` where no other
    try can succeed.
    """
    if on_partial not in ("fail", "succeed"):  # there is no state for what is skipped
        raise GaveUpError(f"on_partial is fail or succeed, not {on_partial!r}")
    logger, place = get_run_logger(), place_of()
    try:
        wanted = as_spec(_as_path(spec), Path(base) if base else None)
        with open_client(load_settings(**settings or {})) as client:
            outcome = _run(client, wanted, place, on_partial, poll_sec)
    except UsageError as error:
        raise GaveUpError(str(error)) from error
    verdict = judge(outcome, on_partial)  # type: ignore[arg-type]  # checked above
    if verdict is Verdict.GIVE_UP:
        raise GaveUpError(f"{outcome.in_words}; {remedy(outcome)}")
    if verdict is Verdict.FAIL:
        raise JobFailedError(outcome)
    (logger.warning if outcome.rows_failed else logger.info)(outcome.in_words)
    return outcome.as_json()


specbatch_job = task(
    run_job, name="specbatch-job", retry_condition_fn=may_succeed, cache_policy=NO_CACHE
)


def _as_path(spec: Mapping[str, Any] | str) -> Spec:
    return Path(spec) if isinstance(spec, str) else spec


def _run(
    client: JobClient, wanted: JobSpec, place: Place, on_partial: Any, poll_sec: float
) -> Outcome:
    """The job's end. A process that ends for another reason than a user leaves the job running."""
    flow = flow_run.id

    def pause(seconds: float) -> None:
        time.sleep(seconds)
        if was_cancelled(flow):
            cancel_with_task(client, wanted, place)
            raise FlowCancelledError("its flow run was cancelled by a user, and its job with it")

    try:
        place = with_input(client, wanted, place)
        job_id = attach(client, wanted, place, on_partial)
        get_run_logger().info("waiting for job %s", job_id)
        return wait(client, job_id, place, poll_sec, pause)
    except Exception:
        raise
    except BaseException:  # a signal ends the process: by whom?
        if was_cancelled(flow):
            cancel_with_task(client, wanted, place)
        raise


def was_cancelled(flow_run_id: Any) -> bool:
    """Whether a user has cancelled the flow run. Without an answer: no."""
    if flow_run_id is None:
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(str(flow_run_id))).state
    except Exception:  # of whatever connection there is; the next poll asks again
        return False
    return state is not None and state.type in _ENDED_BY_A_USER


def place_of() -> Place:
    """The flow run, or outside of a flow the task run. All tries have the same place.

    Two calls with the same spec in one flow run are one job: they name the same output.
    """
    if flow_run.id is None:
        return Place("prefect", "", str(task_run.id), str(task_run.task_name))
    return Place("prefect", str(flow_run.flow_name), str(flow_run.id), str(task_run.task_name))
