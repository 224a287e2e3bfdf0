"""The Celery app. Every setting has its reason beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from celery import Celery

from specbatch.schemas.masking import remember
from specbatch.schemas.messages import WorkMessage
from specbatch.schemas.records import DueWork
from specbatch.schemas.routing import queue_for
from specbatch.schemas.settings import Settings
from specbatch.workers.broker import declarations, tls_options, transport_options
from specbatch.workers.guard import WORK_TASK

log = logging.getLogger(__name__)


def make_app(settings: Settings) -> Celery:
    """An app for submitting and for working alike; imports no engine.

    Raises `UsageError` for TLS options of the broker's URL that cannot be.
    """
    remember([settings.broker_url])
    url, tls = tls_options(settings.broker_url)
    # Not the current app: a submitter may live in a process that has a Celery of its own.
    app = Celery("specbatch", broker=url, amqp=declarations(url), set_as_current=False)
    app.conf.update(
        # --- what becomes of a message
        task_acks_late=True,  # a killed worker's message comes back
        task_reject_on_worker_lost=True,  # the same for prefork children
        task_acks_on_failure_or_timeout=True,  # else dropped; the sweeper enqueues again
        task_default_exchange="",  # it needs no binding: see `WorkQueues`
        task_create_missing_queues=True,  # queues are named after models; `broker.py` declares them
        # --- what is in a message
        task_serializer="json",
        event_serializer="json",
        accept_content=["json"],  # no pickle: a message must not be able to run code
        # --- results live in the store, so nothing is kept in a backend
        result_backend=None,
        task_ignore_result=True,
        task_store_errors_even_if_ignored=False,
        # --- how much a worker takes
        worker_prefetch_multiplier=1,  # as many as it has threads: the next waits where one is free
        # Redis only, and no cure there: the flag asks the same count of unacknowledged messages
        # that drifts, and a reconnect loses it. Where a worker is deaf, others and the sweepers
        # are not.
        worker_disable_prefetch=False,
        # After a reconnect Celery would take fewer messages and never get back to all of them: a
        # quorum queue's prefetch cannot be changed while it is consumed. Doubles are no harm here.
        worker_enable_prefetch_count_reduction=False,
        worker_detect_quorum_queues=True,  # they refuse the channel-wide prefetch
        # --- when the broker goes away
        worker_cancel_long_running_tasks_on_connection_loss=False,  # the lease outlives the broker
        broker_connection_retry=True,
        broker_connection_retry_on_startup=True,
        # RabbitMQ closes the channel of a consumer that holds an unacknowledged message for longer
        # than its timeout. That would end the worker; it reconnects, and the group continues.
        broker_channel_error_retry=True,
        broker_connection_max_retries=None,  # counted by `consumer.py`, with what fails later
        # --- when the worker goes
        worker_soft_shutdown_timeout=0.0,  # a cold end would wait for it; `GracefulShutdown` waits
        # --- what is not used, and would cost messages or give away control
        worker_enable_remote_control=False,  # the store is the control plane
        worker_send_task_events=False,
        task_send_sent_event=False,
        event_queue_expires=60,
        worker_hijack_root_logger=False,  # logs are the caller's, and masked there
        worker_consumer="specbatch.workers.consumer:CheckedConsumer",  # refuses what is not ours
        broker_use_ssl=tls or False,
        broker_transport_options=transport_options(url),
    )
    return app


def make_enqueue(app: Celery) -> Callable[[DueWork], None]:
    """Sends a work message for a unit. A lost one costs time: the sweeper enqueues it again."""

    def enqueue(work: DueWork) -> None:
        message = WorkMessage(job_id=work.job_id, stage=work.stage, group_index=work.group_index)
        app.send_task(
            WORK_TASK,
            kwargs=message.model_dump(mode="json"),
            queue=queue_for(work.stage, work.model, work.priority),
            retry=False,
        )

    return enqueue


def make_queue_length(app: Celery) -> Callable[[DueWork], tuple[str, int]]:
    """Finds the queue of a unit of work, and how many messages wait there.

    Messages that workers have taken already are not counted. A queue that does not exist, or a
    broker that does not answer, counts as empty: enqueuing too often does no harm.
    """

    def queue_length(work: DueWork) -> tuple[str, int]:
        name = queue_for(work.stage, work.model, work.priority)
        try:
            with app.connection_for_write() as connection, connection.channel() as channel:
                return name, int(channel.queue_declare(queue=name, passive=True).message_count)
        except Exception as error:  # brokers raise many kinds, and for a missing queue another
            log.debug("the length of queue %s is not known: %s", name, error)
            return name, 0

    return queue_length
