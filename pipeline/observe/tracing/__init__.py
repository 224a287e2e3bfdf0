"""Spans, and the log lines that name them."""
