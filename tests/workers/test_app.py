"""How the app is set up for each broker."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest
from celery import Celery, current_app
from celery.utils.quorum_queues import detect_quorum_queues

from specbatch.schemas.errors import UsageError
from specbatch.schemas.settings import Settings
from specbatch.workers.app import make_app
from specbatch.workers.broker import DELIVERY_LIMIT, VISIBILITY_TIMEOUT_SEC, tls_options
from specbatch.workers.consumer import CheckedConsumer
from support.workers import BIN, wait_until, worker


def app_on(url: str) -> Celery:
    return make_app(Settings(broker_url=url, workspace="unused"))


@pytest.mark.parametrize("url", ["memory://", "redis://h/0", "amqp://h", "rediss://h", "amqps://h"])
def test_nothing_is_lost_with_a_worker_and_nothing_but_json_is_read(url: str) -> None:
    conf = app_on(url).conf
    assert conf.task_acks_late
    assert conf.task_reject_on_worker_lost
    assert conf.worker_prefetch_multiplier == 1
    assert list(conf.accept_content) == ["json"]
    assert {conf.task_serializer, conf.event_serializer} == {"json"}
    assert conf.result_backend is None
    assert not conf.worker_cancel_long_running_tasks_on_connection_loss
    assert conf.broker_channel_error_retry
    assert not conf.worker_enable_remote_control
    assert conf.worker_soft_shutdown_timeout == 0.0


@pytest.mark.parametrize("url", ["amqp://h", "amqps://h/v", "pyamqp://h"])
def test_queues_on_rabbitmq_are_quorum_queues_with_a_delivery_limit(url: str) -> None:
    app = app_on(url)
    queue = app.amqp.queues["verify.0123456789ab"]
    assert queue.queue_arguments == {
        "x-queue-type": "quorum",
        "x-delivery-limit": DELIVERY_LIMIT,
        "x-consumer-timeout": VISIBILITY_TIMEOUT_SEC * 1000,
    }
    assert (queue.exchange.name, queue.routing_key) == ("", queue.name)
    assert detect_quorum_queues(app, "amqp")[0]  # so Celery leaves the channel-wide prefetch alone


def test_queues_elsewhere_have_no_arguments_and_redis_one_visibility_timeout() -> None:
    app = app_on("redis://h/0")
    assert app.amqp.queues["ingest"].queue_arguments is None
    assert app.conf.broker_transport_options["visibility_timeout"] == VISIBILITY_TIMEOUT_SEC


def test_the_consumer_has_all_steps_of_celery_s_but_the_one_for_later() -> None:
    left_out = set(CheckedConsumer.__mro__[1].Blueprint.default_steps) - set(
        CheckedConsumer.Blueprint.default_steps
    )
    assert left_out == {"celery.worker.consumer.delayed_delivery:DelayedDelivery"}


def test_an_app_does_not_take_the_place_of_its_host_s() -> None:
    before = current_app._get_current_object()
    try:
        host = Celery("host")
        app_on("memory://")
        assert current_app._get_current_object() is host
    finally:
        before.set_current()


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    path = tmp_path / "ca.pem"
    path.write_text("a certificate")
    return path


def test_certificates_are_checked_unless_the_url_says_otherwise(ca: Path) -> None:
    assert tls_options("redis://u:p@h/0?x=1") == ("redis://u:p@h/0?x=1", None)
    assert tls_options("rediss://u:p@h/0") == (
        "rediss://u:p@h/0",
        {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True},
    )
    assert tls_options(f"rediss://h/0?ssl_ca_certs={ca}&virtual_host=1") == (
        "rediss://h/0?virtual_host=1",
        {
            "ssl_cert_reqs": ssl.CERT_REQUIRED,
            "ssl_ca_certs": str(ca),
            "ssl_check_hostname": True,
        },
    )
    assert tls_options(f"amqps://h/v?ssl_ca_certs={ca}") == (
        "amqps://h/v",
        {"cert_reqs": ssl.CERT_REQUIRED, "ca_certs": str(ca), "server_hostname": None},
    )
    assert tls_options("amqps://h/v?ssl_cert_reqs=none") == (
        "amqps://h/v",
        {"cert_reqs": ssl.CERT_NONE},
    )
    url, options = tls_options(f"rediss://a?ssl_ca_certs={ca};rediss://b?ssl_cert_reqs=CERT_NONE")
    assert url == "rediss://a;rediss://b"
    assert options == {
        "ssl_cert_reqs": ssl.CERT_NONE,
        "ssl_ca_certs": str(ca),
        "ssl_check_hostname": False,
    }


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("ssl_cert_reqs=maybe", "ssl_cert_reqs=maybe is none of required, optional, none"),
        ("ssl_ca_certs=/no/such", "ssl_ca_certs names /no/such, which is no readable file"),
        ("ssl_ca_cert=/a", "has an unknown option `ssl_ca_cert`; TLS options are"),
    ],
)
def test_wrong_tls_options_are_named(query: str, words: str) -> None:
    with pytest.raises(UsageError, match="SPECBATCH_BROKER_URL") as caught:
        app_on(f"rediss://user:pass-word@h/0?{query}")
    assert words in str(caught.value)
    assert "pass-word" not in str(caught.value)


@pytest.mark.pipeline  # starts processes
def test_celery_status_finds_no_worker_and_does_none_harm(redis_url: str, tmp_path: Path) -> None:
    """As the page about workers says: remote control is off."""
    environment = {"SPECBATCH_BROKER_URL": redis_url, "SPECBATCH_WORKSPACE": str(tmp_path / "w")}
    with worker("record", environment=environment, cwd=tmp_path) as one:
        wait_until("it takes messages", lambda: "ready." in one.text(), [one])
        asked = subprocess.run(
            [str(BIN / "celery"), "-b", redis_url, "status"],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert asked.returncode == 69
        assert "No nodes replied within time constraint" in asked.stderr
        assert one.process.poll() is None
        assert "ERROR" not in one.end()
