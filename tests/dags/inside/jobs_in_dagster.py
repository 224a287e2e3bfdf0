"""Jobs and assets of the tests. What differs between runs comes through a run's tags."""

import json

from dagster import (
    In,
    OpExecutionContext,
    RetryPolicy,
    in_process_executor,
    job,
    multiprocess_executor,
    op,
)

from specbatch.jobs.dags.dagster import SpecbatchResource, specbatch_asset, specbatch_op

RESOURCES = {"specbatch": SpecbatchResource(poll_sec=0.1)}
TAG = "spec"


def spec_of(context: OpExecutionContext) -> dict:
    return json.loads(context.run.tags[TAG])


@op(ins={"outcome": In(dict)})
def after(outcome: dict) -> str:
    """What follows a job."""
    return outcome["state"]


ops = {
    word: specbatch_op(f"partial_{word}", spec_of, on_partial=word)
    for word in ("fail", "succeed", "skip")
}
retried = specbatch_op("retried", spec_of, retry_policy=RetryPolicy(max_retries=1))


@job(resource_defs=RESOURCES, executor_def=in_process_executor)
def partial_fail() -> None:
    after(ops["fail"]())


@job(resource_defs=RESOURCES, executor_def=in_process_executor)
def partial_succeed() -> None:
    after(ops["succeed"]())


@job(resource_defs=RESOURCES, executor_def=in_process_executor)
def partial_skip() -> None:
    after(ops["skip"]())


@job(resource_defs=RESOURCES, executor_def=multiprocess_executor)
def in_processes() -> None:
    retried()


@job(resource_defs=RESOURCES, executor_def=in_process_executor)
def in_one_process() -> None:
    ops["fail"]()


changing = specbatch_asset(
    name="changing",
    spec=lambda context: spec_of(context)[min(context.retry_number, 1)],
    retry_policy=RetryPolicy(max_retries=1),
)
