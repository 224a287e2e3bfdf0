"""The threads that tasks run in: one process, one engine, many waiting groups."""

from __future__ import annotations

from celery.concurrency.thread import TaskPool
from celery.signals import worker_shutting_down


class Threads(TaskPool):  # type: ignore[misc]  # celery has no types
    """Celery's own, which cannot be asked to end a task: it raises where a second Ctrl-C, or
    SIGQUIT, asks for it."""

    def terminate_job(self, pid: int, signal: int | None = None) -> None:  # noqa: ARG002 - celery's
        """Nobody can end a thread. Its group is given back when its engine stops; Celery says that
        it shuts down only after it has waited for the threads, so it is said here."""
        worker_shutting_down.send(sender=self, sig=signal, how="Cold", exitcode=None)
