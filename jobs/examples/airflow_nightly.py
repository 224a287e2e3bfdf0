"""A nightly DAG in Airflow: one job per part of the input, and a task that uses its output."""

from __future__ import annotations

from datetime import datetime, timedelta

from airflow.sdk import DAG, AssetAlias, Param, task

from specbatch.jobs.dags.airflow import SpecbatchOperator

written = AssetAlias("summaries")  # gets an asset for every output that is written

with DAG(
    "specbatch_nightly",
    schedule="0 2 * * *",
    start_date=datetime(2026, 11, 1),
    catchup=False,
    params={
        "input": Param("s3://bucket/prompts", type="string"),
        "output": Param("s3://bucket/summaries", type="string"),
        "verifier": Param("llama-70b", type="string"),
        "parts": Param(["english", "german"], type="array"),
    },
    # A retry resumes the job of the try before.
    default_args={"retries": 3, "retry_delay": timedelta(minutes=5)},
) as dag:

    @task
    def specs(params=None, ds_nodash=None) -> list[dict]:
        """One job for each part."""
        return [
            {
                "name": f"summaries-{part}",
                "input": {"uri": f"{params['input']}/{part}.jsonl"},
                "output": {"uri": f"{params['output']}/{ds_nodash}/{part}"},
                "verifier": params["verifier"],
                "sampling": {"max_tokens": 12, "seed": 5},
            }
            for part in params["parts"]
        ]

    @task
    def report(outcomes: list[dict]) -> float:
        """Print the cost of the run."""
        for outcome in outcomes:
            print(f"{outcome['output_uri']}: {outcome['rows']} rows, ${outcome['cost_usd']:.6f}")
        return float(sum(outcome["cost_usd"] for outcome in outcomes))

    summaries = SpecbatchOperator.partial(
        task_id="summarise",
        on_partial="succeed",  # some rows of a run may fail
        deferrable=True,  # waits in the triggerer
        poll_sec=1,
        outlets=[written],
    ).expand(spec=specs())
    report(summaries.output)

with DAG("specbatch_after", schedule=[written], start_date=datetime(2026, 11, 1)):

    @task(inlets=[written])
    def publish(inlet_events=None) -> list[str]:
        """Runs when an output is written; its figures are in the event."""
        return [event.extra["data_uri"] for event in inlet_events[written]]

    publish()
