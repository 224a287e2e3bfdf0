"""What differs between brokers: TLS options in the URL, transport options, how queues are declared.

TLS is asked for by the scheme, `rediss://` or `amqps://`; the URL says how it is checked:

    ssl_cert_reqs       required (default), optional or none
    ssl_ca_certs        file with the certificates to trust; default: the system's
    ssl_certfile        this client's certificate, and ...
    ssl_keyfile         ... its key
    ssl_check_hostname  true (default) or false
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from celery import Celery
from celery.app.amqp import AMQP, Queues
from kombu.entity import Exchange, Queue

from specbatch.schemas.errors import UsageError

log = logging.getLogger(__name__)

# Groups take minutes; anything unacknowledged for longer is delivered again, and the lease decides
# which worker continues. All apps must agree, for on Redis the shortest wins.
VISIBILITY_TIMEOUT_SEC = 3600
# A message that ends its worker every time is dropped after so many deliveries; otherwise it would
# go round for ever. The store counts attempts itself, and the sweeper enqueues while some are left.
DELIVERY_LIMIT = 10

# A queue that has a leader answers at once. RabbitMQ itself gives up after five seconds, ten times.
LEADERLESS_SEC = 5.0
NO_LEADER = 541  # AMQP's internal error: what it then says to whoever wants to consume

_REQUIREMENTS = {
    "required": ssl.CERT_REQUIRED,
    "optional": ssl.CERT_OPTIONAL,
    "none": ssl.CERT_NONE,
}
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TLS = ("rediss", "amqps")
_QUORUM_ARGUMENTS: Mapping[str, Any] = {
    "x-queue-type": "quorum",  # replicated: a queue outlives a node of the broker
    "x-delivery-limit": DELIVERY_LIMIT,
    # Else a consumer is thrown out after the server's 30 minutes. Older servers do not know this
    # argument and ignore it; being thrown out costs a reconnect and a doubled message, no work.
    "x-consumer-timeout": VISIBILITY_TIMEOUT_SEC * 1000,
}


def scheme_of(url: str) -> str:
    return url.partition("://")[0]


def is_rabbit(url: str) -> bool:
    return scheme_of(url) in ("amqp", "amqps", "pyamqp")


def transport_options(url: str) -> dict[str, Any]:
    if url.startswith("memory://"):
        return {"polling_interval": 0.01}  # the default second would dominate small jobs
    if scheme_of(url).startswith("redis"):
        return {
            "visibility_timeout": VISIBILITY_TIMEOUT_SEC,
            "queue_order_strategy": "priority",  # in the order in which `queue_names` has them
            "socket_keepalive": True,  # a host that vanished without a word is noticed
            # One that accepts and never answers, too: without these a call would wait for ever.
            "socket_connect_timeout": 10,
            "socket_timeout": 30,
        }
    return {}


class WorkQueues(Queues):  # type: ignore[misc]  # celery has no types
    """Queues as submitters and workers declare them, alike, when they first name one."""

    rabbit = False

    def new_missing(self, name: str) -> Queue:
        return Queue(
            name,
            # The default exchange needs no binding. On Redis a binding is a key, and one of another
            # type would stop whoever declares the queue.
            Exchange(""),
            name,
            queue_arguments=dict(_QUORUM_ARGUMENTS) if self.rabbit else None,
        )


class RabbitQueues(WorkQueues):
    rabbit = True


class RedisAMQP(AMQP):  # type: ignore[misc]  # celery has no types
    """Celery's declarations with our queues; also for the broker in memory."""

    queues_cls = WorkQueues

    @property
    def Connection(self) -> type:  # noqa: N802 - as the base has it
        """Redis is read as something that others may have written to."""
        from specbatch.workers.redis_transport import CheckedConnection

        return CheckedConnection


class RabbitAMQP(AMQP):  # type: ignore[misc]  # celery has no types
    """The same on RabbitMQ."""

    queues_cls = RabbitQueues


def declarations(url: str) -> type[AMQP]:
    """The class that knows how queues are declared on this broker."""
    return RabbitAMQP if is_rabbit(url) else RedisAMQP


def replace_leaderless(app: Celery, names: Iterable[str]) -> None:
    """Delete those of RabbitMQ's quorum queues that have no leader; consumers declare them anew.

    A node that is killed within seconds of a queue's declaration may have lost its replica. It then
    waits for a leader for ever. No work is lost with the messages: sweepers enqueue it again.
    """
    for name in names:
        if _is_leaderless(app, name):
            log.warning("queue %s has no leader: it is deleted, and declared anew", name)
            with app.connection_for_write() as connection, connection.channel() as channel:
                channel.queue_delete(name)


def _is_leaderless(app: Celery, name: str) -> bool:
    """Whether nobody can consume from the queue. Messages that come meanwhile go back to it."""
    with app.connection_for_write(transport_options={"read_timeout": LEADERLESS_SEC}) as connection:
        channel = connection.channel()
        try:
            channel.basic_consume(name, callback=lambda _: None)
        except TimeoutError:
            connection.collect()  # not closed properly, which would wait for an answer
            return True
        except connection.channel_errors:
            return False  # it does not exist
        return False


def tls_options(url: str) -> tuple[str, dict[str, Any] | None]:
    """(the URL without TLS options, Celery's `broker_use_ssl`); None where there is no TLS.

    Several URLs, separated by `;`, share their options. Raises `UsageError` for wrong ones.
    """
    if scheme_of(url) not in _TLS:
        return url, None
    bare, given = [], {}
    for one in url.split(";"):
        base, _, query = one.partition("?")
        values = dict(parse_qsl(query, keep_blank_values=True))
        given.update({name: values.pop(name) for name in list(values) if name.startswith("ssl_")})
        bare.append(f"{base}?{urlencode(values)}" if values else base)
    options: dict[str, Any] = {"ssl_cert_reqs": _requirement(given.pop("ssl_cert_reqs", None))}
    checked = options["ssl_cert_reqs"] != ssl.CERT_NONE
    checks_name = given.pop("ssl_check_hostname", "true").lower() != "false" and checked
    for name in _FILES:
        if name in given:
            options[name] = _readable(name, given.pop(name))
    if given:
        raise UsageError(
            f"SPECBATCH_BROKER_URL has an unknown option `{min(given)}`; TLS options are "
            f"ssl_cert_reqs, ssl_check_hostname, {', '.join(_FILES)}"
        )
    if scheme_of(url) == "rediss":
        options["ssl_check_hostname"] = checks_name
        return ";".join(bare), options
    # The AMQP client has names of its own, and takes the URL's host for None.
    named = {name.removeprefix("ssl_"): value for name, value in options.items()}
    return ";".join(bare), named | ({"server_hostname": None} if checks_name else {})


def _requirement(word: str | None) -> ssl.VerifyMode:
    name = (word or "required").lower().removeprefix("cert_")
    if name not in _REQUIREMENTS:
        raise UsageError(
            f"SPECBATCH_BROKER_URL: ssl_cert_reqs={word} is none of {', '.join(_REQUIREMENTS)}"
        )
    return _REQUIREMENTS[name]


def _readable(name: str, path: str) -> str:
    if not os.access(path, os.R_OK) or not Path(path).is_file():
        raise UsageError(f"SPECBATCH_BROKER_URL: {name} names {path}, which is not a readable file")
    return path
