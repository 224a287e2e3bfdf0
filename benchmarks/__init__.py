"""Benchmarks: figures come from here, never from tests. Not in the wheel."""
