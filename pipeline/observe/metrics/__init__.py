"""Metrics: their names, how they are counted, and the endpoint that serves them."""
