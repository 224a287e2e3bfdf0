"""Writes what a job publishes: output files, manifests and exported sets."""
