"""A nightly flow in Prefect: a job of the day's prompts, and a task that uses its outcome."""

import os

from prefect import flow, task

from specbatch.jobs.dags.prefect import specbatch_job

summarise = specbatch_job.with_options(
    name="summarise",
    retries=3,  # a retry resumes the job
    retry_delay_seconds=60,
)


@task
def report(outcome: dict) -> float:
    """The cost of the run, from the outcome of the job."""
    return float(outcome["cost_usd"])


@flow
def nightly(day: str) -> float:
    """Where the store and the broker are is said by SPECBATCH_DATABASE_URL and the like."""
    bucket = os.environ["NIGHTLY_BUCKET"]
    outcome = summarise(
        {
            "name": "summaries",
            "input": {"uri": f"{bucket}/{day}.jsonl"},
            "output": {"uri": f"{bucket}/out/{day}"},
            "verifier": os.environ["NIGHTLY_VERIFIER"],
            "sampling": {"max_tokens": 12, "seed": 5},
        },
        on_partial="succeed",  # some rows of a run may fail
        poll_sec=1.0,
    )
    cost: float = report(outcome)
    return cost


if __name__ == "__main__":
    nightly.serve(name="nightly", cron="0 2 * * *", parameters={"day": "2026-11-01"})
