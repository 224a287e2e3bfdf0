"""Celery app, lifecycle and thin tasks. Everything a task does is a stage of `specbatch.pipeline`."""
