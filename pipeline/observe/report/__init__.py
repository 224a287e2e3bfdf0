"""The report of a job: one HTML page."""
