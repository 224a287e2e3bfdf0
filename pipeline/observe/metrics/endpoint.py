"""The Prometheus endpoint of a worker: everything that is counted, on one port, and its health.

`/healthz` answers 200 while every process behind the port can take messages from the broker, and
503 with one sentence otherwise. It asks neither the store nor the broker. All else is metrics.

Where processes of a machine share a port (`metrics/folder.py`), one of them serves what all of them
counted. When it ends another takes its place within a second.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.pipeline.observe.metrics.metric_names import DEAF, METRICS, Kind, Metric, Scope
from specbatch.pipeline.observe.metrics.metrics import Labels, Metrics, Snapshot, Value, merged
from specbatch.schemas.errors import MissingExtraError, UsageError
from specbatch.schemas.visible import visible

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

    from specbatch.pipeline.observe.metrics.folder import MetricsFolder

log = logging.getLogger(__name__)

HEALTH_PATH = "/healthz"
WRITE_SEC = 1.0  # between two looks at what this process counted, for the one that serves

Source = Callable[[], "Iterable[Family]"]


class MetricsEndpoint:
    """Serves from its making until `close`. What there is is asked for at every scrape."""

    def __init__(
        self, port: int, address: str, metrics: Metrics, folder: Path | None = None
    ) -> None:
        """`folder`: where processes that share the port write what they counted.

        Raises `UsageError` when the port cannot be had, `MissingExtraError` without the extra.
        """
        require_observe_extra()
        self._port = port
        self._address = address
        self._metrics = metrics
        self._sources: list[Source] = []
        self._server: tuple[Any, threading.Thread] | None = None
        self._folder: MetricsFolder | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if folder is None:
            self._serve()
            return
        from specbatch.pipeline.observe.metrics.folder import MetricsFolder

        self._folder = MetricsFolder(folder)
        self._folder.write(metrics.read())
        try:
            if self._folder.serves(port):
                self._serve()
        except UsageError:
            self._folder.close({})
            raise
        self._thread = threading.Thread(target=self._share, name="metrics", daemon=True)
        self._thread.start()

    def add(self, source: Source) -> None:
        """Further families: called at every scrape, in its thread."""
        self._sources.append(source)

    def collect(self) -> Iterator[Family]:
        """What a scrape gets: the protocol of Prometheus' collectors."""
        yield from families(self._counted())
        for source in list(self._sources):
            yield from source()

    def health(self) -> str | None:
        """What is wrong with the processes behind this port, in words; None: nothing."""
        deaf = self._counted().get(DEAF.name, {}).get((), 0.0)
        if not deaf:
            return None
        whose = "this worker's process" if deaf == 1 else f"{deaf:.0f} processes of this worker"
        return f"{whose} cannot take messages from the broker"

    def _counted(self) -> Snapshot:
        """By all processes that share the port."""
        snapshot = self._metrics.read()
        if self._folder is not None:
            # What was told once must not be less for who serves next, were this process killed now.
            with suppress(OSError):
                self._folder.write(snapshot)
            snapshot = merged([snapshot, *self._folder.others()])
        return snapshot

    def close(self) -> None:
        """Serve no longer. Others that share the port go on, with what was counted here.

        To be closed twice is no harm.
        """
        if self._stop.is_set():
            return
        self._sources.clear()
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
        if self._folder is not None:
            self._folder.close(self._metrics.read())

    def _serve(self) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server = start_http_server(self._port, self._address, registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"metrics cannot be served on {self._address}:{self._port} ({reason}): set another "
                "SPECBATCH_METRICS_PORT, or the same SPECBATCH_METRICS_DIR for all workers of this "
                "machine that share the port"
            ) from None
        server: Any = self._server[0]
        server.set_app(self._with_health(server.get_app()))
        log.info("metrics are served on %s:%d", self._address, self._port)

    def _with_health(self, metrics: Callable[..., Any]) -> Callable[..., Any]:
        """The WSGI application of the metrics, with another page."""

        def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
            if environ.get("PATH_INFO") != HEALTH_PATH:
                return metrics(environ, start_response)
            trouble = self.health()
            status = "200 OK" if trouble is None else "503 Service Unavailable"
            start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{trouble or 'ok'}\n".encode()]

        return answer

    def _share(self) -> None:
        """Tell the others what was counted; serve when nobody else does."""
        assert self._folder is not None, "else there is nobody to share with"
        complained = False
        while not self._stop.wait(WRITE_SEC):
            try:
                self._folder.write(self._metrics.read())
                if self._server is None and self._folder.serves(self._port):
                    self._serve()
                complained = False
            except (OSError, UsageError) as error:
                self._folder.serves_no_more()  # whoever can have the port may try
                if not complained:
                    log.warning("metrics of this process are not shared: %s", error)
                complained = True


def families(snapshot: Snapshot) -> Iterator[Family]:
    """Every metric of a process, those of which there is nothing yet included."""
    for metric in METRICS:
        if metric.scope is Scope.PROCESS:
            yield family(metric, snapshot.get(metric.name, {}))


def family(metric: Metric, values: dict[Labels, Value] | dict[Labels, float]) -> Family:
    """One metric as Prometheus' client has it."""
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
    from prometheus_client.utils import floatToGoString

    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
        for labels, value in values.items():
            assert isinstance(value, list), "it was counted as a histogram"
            rising = list(accumulate(value[:-1]))
            pairs = list(zip(bounds, rising, strict=True))
            histogram.add_metric(list(map(visible, labels)), pairs, value[-1])
        return histogram
    made = (
        CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        if metric.kind is Kind.COUNTER
        else GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    )
    for labels, value in values.items():
        assert not isinstance(value, list), "it was counted as a number"
        made.add_metric(list(map(visible, labels)), value)
    return made


def require_observe_extra() -> None:
    """Raise `MissingExtraError` unless what serves metrics is installed."""
    from importlib.util import find_spec

    if find_spec("prometheus_client") is None:
        raise MissingExtraError(
            "SPECBATCH_METRICS_PORT needs prometheus-client, which is not installed here: "
            "`pip install 'specbatch[observe]'`, or unset it"
        )
