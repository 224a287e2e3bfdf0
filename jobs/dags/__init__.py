"""Runs jobs as tasks of other schedulers: Airflow, Dagster, Prefect, and their common part."""
