"""Benchmarks: figures come from here, never from tests."""
