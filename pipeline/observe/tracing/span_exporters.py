"""Where spans go: to an OTLP endpoint over HTTP, or into a file that a collector can read."""

from __future__ import annotations

import base64
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import orjson
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from specbatch.schemas.masking import remember, remember_secrets

log = logging.getLogger(__name__)

FILE = "file:"
TIMEOUT_SEC = 3.0  # of a batch with its retries, where OTEL_EXPORTER_OTLP_TIMEOUT does not say
_TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
_HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_IDS = ("traceId", "spanId", "parentSpanId")


def exporter_of(to: str) -> SpanExporter:
    """For `otlp` or `file:PATH`."""
    if to.startswith(FILE):
        return FileExporter(Path(to.removeprefix(FILE)).expanduser())
    remember(os.environ.get(name, "") for name in _ENDPOINTS)
    remember_secrets(_values(os.environ.get(name, "") for name in _HEADERS))
    logging.getLogger(trace_exporter.__name__).addFilter(_silent)
    is_set = any(os.environ.get(name) for name in _TIMEOUTS)
    return trace_exporter.OTLPSpanExporter(timeout=None if is_set else TIMEOUT_SEC)


def _values(headers: Iterable[str]) -> Iterable[str]:
    """`name=value,…`, where a value may hold a key."""
    for pair in ",".join(headers).split(","):
        value = pair.partition("=")[2].strip()
        yield from (value, unquote(value))


class _Silence(threading.local):
    """Drops what a library logs in one of our threads while it is on."""

    on = False

    def __call__(self, _: logging.LogRecord) -> bool:
        return not self.on


_silent = _Silence()


class Forgiving(SpanExporter):
    """Logs once that spans cannot be sent, and once that they can be again; raises nothing."""

    def __init__(self, to: SpanExporter) -> None:
        self._to = to
        self._failing = False
        self._lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        _silent.on = True  # the exporter logs a line for each retry
        reason = "check OTEL_EXPORTER_OTLP_ENDPOINT"
        try:
            result = self._to.export(spans)
        except Exception as error:  # each exporter has its own kinds
            result, reason = SpanExportResult.FAILURE, str(error) or type(error).__name__
        finally:
            _silent.on = False
        if result is SpanExportResult.FAILURE:
            self._lost += len(spans)
            if not self._failing:
                log.warning("traces are lost, work continues: they cannot be sent (%s)", reason)
        elif self._failing:
            log.warning("traces are sent again; %d spans were lost", self._lost)
            self._lost = 0
        self._failing = result is SpanExportResult.FAILURE
        return result

    def shutdown(self) -> None:
        self._to.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._to.force_flush(timeout_millis)


class FileExporter(SpanExporter):
    """Lines of OTLP's JSON, one per batch. Several processes may write to one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        line = orjson.dumps(as_json(encode_spans(spans))) + b"\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        descriptor = os.open(self._path, flags, 0o640)
        try:
            os.write(descriptor, line)  # one call: no other process writes into it
        finally:
            os.close(descriptor)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is held."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002 - nothing waits
        return True


def as_json(request: Any) -> dict[str, Any]:
    """An export request as OTLP has it in JSON: ids in hexadecimal, kinds as numbers."""
    plain: dict[str, Any] = MessageToDict(request, use_integers_for_enums=True)
    for resource in plain.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                for one in (span, *span.get("links", ())):
                    for name in _IDS:
                        if name in one:
                            one[name] = base64.b64decode(one[name]).hex()
    return plain
