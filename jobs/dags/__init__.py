"""Jobs as tasks of other schedulers: `airflow.py`, `dagster.py`, and what both have in common."""
