"""The Celery app. Every setting has its reason beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery

from specbatch.schemas.messages import WorkMessage
from specbatch.schemas.records import Bell
from specbatch.schemas.routing import queue_for
from specbatch.schemas.settings import Settings

TASK_NAME = "specbatch.work"
# Groups take minutes; anything unacknowledged for longer is delivered again, and the lease decides
# who may go on. All apps must agree, for the shortest wins.
VISIBILITY_TIMEOUT_SEC = 3600


def make_app(settings: Settings) -> Celery:
    """An app for submitting and for working alike; imports no engine."""
    app = Celery("specbatch", broker=settings.broker_url)
    app.conf.update(
        task_ignore_result=True,  # results live in the store
        task_acks_late=True,  # a killed worker's message comes back
        task_reject_on_worker_lost=True,  # the same for prefork children
        task_acks_on_failure_or_timeout=True,  # a rejected one would be dropped; we re-ring instead
        task_serializer="json",
        accept_content=["json"],  # no pickle: a message must not be able to run code
        task_create_missing_queues=True,  # queues are named after models
        worker_prefetch_multiplier=1,  # a group waits where a free worker can take it
        worker_cancel_long_running_tasks_on_connection_loss=False,  # the lease outlives the broker
        worker_soft_shutdown_timeout=10.0,  # shorter than an orchestrator's grace period
        worker_enable_remote_control=False,  # the store is the control plane
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        broker_transport_options=_transport_options(settings.broker_url),
        event_queue_expires=60,
    )
    return app


def _transport_options(broker_url: str) -> dict[str, Any]:
    if broker_url.startswith("memory://"):
        return {"polling_interval": 0.01}  # the default second would dominate small jobs
    if broker_url.startswith("redis"):
        return {"visibility_timeout": VISIBILITY_TIMEOUT_SEC}
    return {}


def make_ring(app: Celery) -> Callable[[Bell], None]:
    """A bell that publishes a pointer to work. A lost one costs time: the sweeper rings too."""

    def ring(bell: Bell) -> None:
        message = WorkMessage(job_id=bell.job_id, stage=bell.stage, group_index=bell.group_index)
        app.send_task(
            TASK_NAME,
            kwargs=message.model_dump(mode="json"),
            queue=queue_for(bell.stage, bell.model),
            retry=False,
        )

    return ring
