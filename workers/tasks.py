"""The one task: parse the message, call the stage, return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery

from specbatch.pipeline.bootstrap import Worker
from specbatch.schemas.errors import DeviceLostError
from specbatch.schemas.messages import WorkMessage
from specbatch.workers.app import TASK_NAME


def register(app: Celery, worker: Worker, on_lost: Callable[[DeviceLostError], None]) -> None:
    """Bind the task to this process's worker; `on_lost` ends it when its device is gone."""

    @app.task(name=TASK_NAME, shared=False)  # type: ignore[untyped-decorator] # celery has no types
    def work(**fields: Any) -> None:
        message = WorkMessage.model_validate(fields)
        try:
            worker.stages.run(message.stage, message.job_id, message.group_index)
        except DeviceLostError as error:
            on_lost(error)
