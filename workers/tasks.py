"""The Celery tasks: parse the message, run the stage, return.

The consumer has checked the message (`guard.py`). It is parsed again here, because a task may be
called in other ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery

from specbatch.pipeline.bootstrap import Worker
from specbatch.schemas.crash_points import CrashPoint, reach
from specbatch.schemas.errors import DeviceLostError
from specbatch.schemas.messages import RefillMessage, WorkMessage
from specbatch.workers.guard import REFILL_TASK, WORK_TASK
from specbatch.workers.hints import send_hint


def register(app: Celery, worker: Worker, on_lost: Callable[[DeviceLostError], None]) -> None:
    """Bind the tasks to this process's worker; `on_lost` ends it when its device is gone."""

    @app.task(name=WORK_TASK, shared=False)  # type: ignore[untyped-decorator] # celery has no types
    def work(**fields: Any) -> None:
        message = WorkMessage.model_validate(fields)
        try:
            worker.run(message.stage, message.job_id, message.group_index)
        except DeviceLostError as error:
            on_lost(error)
            worker.outage.close()  # no task may keep the worker from ending
        reach(CrashPoint.ACK)

    @app.task(  # type: ignore[untyped-decorator]  # celery has no types
        name=REFILL_TASK,
        shared=False,
        acks_late=False,  # a lost one is asked for again
    )
    def refill(**fields: Any) -> None:
        message = RefillMessage.model_validate(fields)
        try:
            hint = worker.refiller.refill(message) if worker.refiller else None
        except DeviceLostError as error:
            on_lost(error)
            return
        if hint is not None:
            send_hint(app, message.reply_to, hint)
