"""DAGs of the tests. What differs between runs comes through a run's configuration."""

from __future__ import annotations

from datetime import datetime, timedelta

from airflow.sdk import DAG, task

from specbatch.jobs.dags.airflow import SpecbatchOperator

START = datetime(2026, 1, 1)
SPEC = {
    "name": "in-a-dag",
    "input": {"uri": "{{ dag_run.conf['input'] }}"},
    "output": {"uri": "{{ dag_run.conf['output'] }}"},
    "verifier": "{{ dag_run.conf['verifier'] }}",
    "sampling": {"max_tokens": 12, "seed": 5},
    "group_size": 4,
}
AGAIN = {"retries": 1, "retry_delay": timedelta(0)}


@task
def after(outcome: dict) -> str:
    """What follows a job."""
    return outcome["state"]


with DAG("waits_in_the_task", start_date=START, schedule=None):
    one = SpecbatchOperator(task_id="job", spec=SPEC, poll_sec=0.1, deferrable=False, **AGAIN)
    after(one.output)

for word in ("fail", "succeed", "skip"):
    with DAG(f"partial_{word}", start_date=START, schedule=None):
        one = SpecbatchOperator(
            task_id="job", spec=SPEC, on_partial=word, poll_sec=0.1, deferrable=True, **AGAIN
        )
        after(one.output)

with DAG("from_a_file", start_date=START, schedule=None):
    SpecbatchOperator(
        task_id="job",
        spec_path="spec_{{ 'of' }}_a_file.yaml",
        conn_id="{{ dag_run.conf['connection'] }}",
        poll_sec=0.1,
        deferrable=True,
    )
