"""Job specs and DAGs to begin with."""
