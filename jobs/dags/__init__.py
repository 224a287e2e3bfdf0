"""Runs jobs as tasks of other schedulers: `airflow.py`, `dagster.py` and their common part."""
