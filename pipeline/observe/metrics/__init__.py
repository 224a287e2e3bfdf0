"""Metrics: their names, what is counted, and where it is read."""
