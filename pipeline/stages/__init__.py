"""The stages of a job: ingest, propose, verify, record, publish."""
