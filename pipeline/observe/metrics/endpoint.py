"""The Prometheus endpoint of a process: what it counted, figures of the store, and its health.

Every process serves a port of its own. `/healthz` answers 200 while the process can take messages
from the broker, and 503 with one sentence otherwise; it asks neither the store nor the broker. All
other paths answer with the metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

from specbatch.pipeline.observe.metrics import metric_names as names
from specbatch.pipeline.observe.metrics.meter import Meter
from specbatch.pipeline.observe.metrics.registry import Metrics
from specbatch.pipeline.observe.metrics.store_metrics import StoreMetrics
from specbatch.pipeline.observe.units import version_here
from specbatch.schemas.errors import UsageError
from specbatch.schemas.figures import StoreFigures
from specbatch.schemas.settings import Settings

log = logging.getLogger(__name__)

HEALTH_PATH = "/healthz"


class Exposure:
    """What a worker's process counts, served from its construction until `close`."""

    def __init__(self, settings: Settings, trouble: Callable[[], str | None]) -> None:
        """`trouble` says why the process can take no messages; None: it can. It is called at every
        reading, so that the answer is never an old one.

        Raises `UsageError` when the port cannot be had.
        """
        metrics = Metrics(settings.metrics_label_values)
        metrics.set(names.BUILD, 1, version_here())
        metrics.set(names.PLANNED_ROLLOUT, float(settings.planned_rollout))
        metrics.ask(names.BROKER_TROUBLE, lambda: {(): float(trouble() is not None)})
        self.meter = Meter(metrics)
        self._trouble = trouble
        self._registry = CollectorRegistry()
        self._registry.register(metrics)
        port, address = settings.metrics_port, settings.metrics_address
        try:
            self._server, self._thread = start_http_server(port, address, self._registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"metrics cannot be served on {address}:{port} ({reason}): set another "
                "SPECBATCH_METRICS_PORT; no two processes of a machine can share one"
            ) from None
        self._server.set_app(self._with_health(make_wsgi_app(self._registry)))
        log.info("metrics are served on %s:%d", address, port)

    def watch(self, figures: Callable[[], StoreFigures]) -> None:
        """Serve the store's figures too."""
        self._registry.register(StoreMetrics(figures))

    def close(self) -> None:
        """Serve no longer; to be called before the store is closed."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _with_health(self, metrics: Callable[..., Any]) -> Callable[..., Any]:
        """The WSGI application of the metrics, with another page."""

        def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
            if environ.get("PATH_INFO") != HEALTH_PATH:
                return metrics(environ, start_response)
            is_well = self._trouble() is None
            status = "200 OK" if is_well else "503 Service Unavailable"
            start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
            said = "ok" if is_well else "this worker's process cannot take messages from the broker"
            return [f"{said}\n".encode()]

        return answer
