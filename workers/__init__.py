"""Celery app, lifecycle and thin tasks. What a task does is a stage of `specbatch.pipeline`."""
