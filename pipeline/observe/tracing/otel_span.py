"""An attempt's span, and how its end is recorded."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from specbatch.pipeline.observe.tracing import span_names as names
from specbatch.pipeline.observe.tracing.tracing import Attributes, Value
from specbatch.schemas.errors import FencedError, RequestCancelledError, SpecbatchError
from specbatch.schemas.records import Lease

if TYPE_CHECKING:
    from specbatch.pipeline.observe.tracing.otel import OtelTracing


class OtelSpan:
    """An attempt's span. Thread-safe."""

    is_on = True

    def __init__(self, tracing: OtelTracing, span: trace.Span, lease: Lease, sampled: bool) -> None:
        self._tracing = tracing
        self._span = span
        self._lease = lease
        self._sampled = sampled
        self._lock = threading.Lock()
        self._over = False

    def note(self, attributes: Attributes) -> None:
        with self._lock:
            if not self._over:
                self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        with self._lock:
            if not self._over:
                self._span.add_event(name, attributes)

    def has_group(self, index: int) -> bool:
        return self._tracing.is_sampled(self._lease.job_id, index)

    def is_asked(self, request_id: str) -> bool:
        return self._sampled and self._tracing.is_asked(request_id)

    def request(
        self, request_id: str, attributes: Attributes, begun_ns: int, ended_ns: int, failed: bool
    ) -> None:
        told: dict[str, Value] = {
            names.JOB: self._lease.job_id,
            names.REQUEST_ID: request_id,
            names.ATTEMPT: self._lease.attempt,
            names.GENERATION: self._lease.generation,
            **attributes,
        }
        if self._lease.group_index is not None:
            told[names.GROUP] = self._lease.group_index
        self._tracing.child(names.REQUEST, self._span, told, begun_ns, ended_ns, failed)

    def end(self, error: BaseException | None = None) -> None:
        """End the span; only the first call counts."""
        with self._lock:
            if self._over:
                return
            self._over = True
            self._span.set_attribute(names.OUTCOME, _outcome(error))
            if error is not None and not isinstance(error, RequestCancelledError):
                _mark_failed(self._span, error)
            self._span.end()

    def leave(self) -> None:
        """Give the span up: the process does not wait for its end."""
        with self._lock:
            if self._over:
                return
            self._over = True
            self._span.set_attribute(names.OUTCOME, "left")
            self._span.set_status(Status(StatusCode.ERROR, "the worker ended before the attempt"))
            self._span.end()


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "kept"
    if isinstance(error, FencedError):
        return "fenced"
    return "stopped" if isinstance(error, RequestCancelledError) else "failed"


def _mark_failed(span: trace.Span, error: BaseException) -> None:
    """An error's kind and what that kind means; its own message may quote a text."""
    kind = type(error)
    means = (kind.__doc__ or "").splitlines()[:1] if isinstance(error, SpecbatchError) else []
    span.set_attribute(names.ERROR_TYPE, kind.__name__)
    span.set_status(Status(StatusCode.ERROR, means[0] if means else None))
