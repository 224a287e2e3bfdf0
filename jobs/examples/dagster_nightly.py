"""A nightly run in Dagster: a daily asset that a job produces, and a report of its cost."""

import os

from dagster import (
    AssetExecutionContext,
    DailyPartitionsDefinition,
    Definitions,
    OpExecutionContext,
    RetryPolicy,
    asset,
)

from specbatch.jobs.dags.dagster import SpecbatchResource, specbatch_asset

days = DailyPartitionsDefinition("2026-11-01")


def job_of_a_day(context: OpExecutionContext) -> dict:
    """The spec of a partition. The same partition of the same run is the same job."""
    bucket = os.environ["NIGHTLY_BUCKET"]
    return {
        "name": "summaries",
        "input": {"uri": f"{bucket}/{context.partition_key}.jsonl"},
        "output": {"uri": f"{bucket}/{context.run_id}/{context.partition_key}"},
        "verifier": os.environ["NIGHTLY_VERIFIER"],
        "sampling": {"max_tokens": 12, "seed": 5},
    }


summaries = specbatch_asset(
    name="summaries",
    spec=job_of_a_day,
    on_partial="succeed",  # some rows of a run may fail
    partitions_def=days,
    retry_policy=RetryPolicy(max_retries=3, delay=60),  # a retry resumes the job
)


@asset(deps=[summaries], partitions_def=days)
def report(context: AssetExecutionContext) -> None:
    """Log the cost of the run, from the metadata of the asset."""
    event = context.instance.get_latest_materialization_event(summaries.key)
    assert event is not None
    assert event.asset_materialization is not None
    metadata = event.asset_materialization.metadata
    context.log.info(f"{metadata['specbatch/cost_usd'].value} dollars")


definitions = Definitions(
    assets=[summaries, report],
    # Where the store and the broker are is said by SPECBATCH_DATABASE_URL and the like.
    resources={"specbatch": SpecbatchResource(poll_sec=1.0)},
)
