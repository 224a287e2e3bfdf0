"""Traces through OpenTelemetry's SDK, with a provider of our own: a host's stays as it is.

Every attempt has a span; it is sent where the group is sampled or the attempt failed. Spans wait in
a bounded queue; while the collector is unreachable, spans are lost and nothing else.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specbatch.pipeline.observe.tracing import span_names as names
from specbatch.pipeline.observe.tracing.context import (
    attempt_span_id,
    is_chosen,
    root_span_id_of,
    trace_id_of,
)
from specbatch.pipeline.observe.tracing.span_exporters import Forgiving, exporter_of
from specbatch.pipeline.observe.tracing.tracing import (
    Attributes,
    Span,
    TraceOptions,
    Tracing,
    Value,
)
from specbatch.pipeline.observe.units import version_here
from specbatch.schemas.errors import FencedError, RequestCancelledError, SpecbatchError
from specbatch.schemas.records import JobRow, Lease, Stage
from specbatch.schemas.routing import queue_for

log = logging.getLogger(__name__)

LAST_MOMENT_SEC = 1.0  # for attempts to end when their worker does
MOST_CLOSE_SEC = 5.0  # that sending the last spans may take: an orchestrator's grace is short
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_FIRST_REQUEST = "/0/0"  # of a job: the first sample of its first row


class _Ids(IdGenerator):
    """The ids that a thread was given, or random ones."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self._given = threading.local()

    @contextmanager
    def given(self, span_id: int, trace_id: int) -> Iterator[None]:
        self._given.ids = (span_id, trace_id)
        try:
            yield
        finally:
            self._given.ids = None

    def generate_span_id(self) -> int:
        ids = getattr(self._given, "ids", None)
        return int(ids[0]) if ids else self._random.generate_span_id()

    def generate_trace_id(self) -> int:
        ids = getattr(self._given, "ids", None)
        return int(ids[1]) if ids else self._random.generate_trace_id()


class _Chosen(SpanProcessor):
    """Passes on what is sampled and what failed."""

    def __init__(self, to: SpanProcessor) -> None:
        self._to = to

    def on_end(self, span: ReadableSpan) -> None:
        failed = span.status.status_code is StatusCode.ERROR
        if failed or (span.attributes or {}).get(names.SAMPLED, True):
            self._to.on_end(span)

    def shutdown(self) -> None:
        self._to.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._to.force_flush(timeout_millis)


class OtelTracing(Tracing):
    """A process's tracing. Users with the same options share one until the last is closed."""

    _shared: ClassVar[dict[TraceOptions, OtelTracing]] = {}
    _gate: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, options: TraceOptions, exporter: SpanExporter | None = None) -> None:
        self._options = options
        self._users = 0
        self._ids = _Ids()
        self._open: set[OtelSpan] = set()
        self._changed = threading.Condition()  # what is open
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=_resource(),
            shutdown_on_exit=False,
            id_generator=self._ids,
        )
        queue = BatchSpanProcessor(Forgiving(exporter or exporter_of(options.to)))
        self._provider.add_span_processor(_Chosen(queue))
        self._tracer = self._provider.get_tracer("specbatch", version_here())

    @classmethod
    def shared(cls, options: TraceOptions) -> OtelTracing:
        with cls._gate:
            found = cls._shared.get(options) or cls(options)
            cls._shared[options] = found
            found._users += 1
            return found

    def flush(self) -> None:
        """Send what has ended."""
        self._provider.force_flush()

    def close(self) -> None:
        with self._gate:
            self._users -= 1
            if self._users > 0:
                return
            if self._shared.get(self._options) is self:
                del self._shared[self._options]
        with self._changed:  # a job is over just before the attempt that published it
            self._changed.wait_for(lambda: not self._open, LAST_MOMENT_SEC)
            still_open = list(self._open)
        for span in still_open:
            span.leave()
        # Beside this thread, which must not wait for an end that is far away and does not answer.
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(MOST_CLOSE_SEC)
        if last.is_alive():
            log.warning("the last traces were not sent within %g s", MOST_CLOSE_SEC)

    # --- spans ----------------------------------------------------------------------------------
    def submitted(self, job: JobRow, created: bool, begun_ns: int) -> None:
        attributes: dict[str, Value] = {
            **_of_job(job),
            names.CREATED: created,
            names.MESSAGING_SYSTEM: self._options.broker,
            names.MESSAGING_TYPE: "send",
            names.MESSAGING_OPERATION: names.SUBMIT,
            names.MESSAGING_QUEUE: queue_for(Stage.INGEST, None, job.priority),
        }
        caller = _caller()
        links = [Link(caller)] if caller is not None else []
        ids: AbstractContextManager[None] = nullcontext()
        under = _under(_root_of(job.job_id))  # of a job that was there before
        if created:
            ids = self._ids.given(root_span_id_of(job.job_id), trace_id_of(job.job_id))
            under = Context()
        with ids:
            self._tracer.start_span(
                names.SUBMIT, under, SpanKind.PRODUCER, attributes, links, start_time=begun_ns
            ).end()

    @contextmanager
    def attempt(self, lease: Lease) -> Iterator[Span]:
        span = self._begin(lease)
        try:
            yield span
        except BaseException as error:
            span.end(error)
            raise
        finally:
            span.end()
            with self._changed:
                self._open.discard(span)
                self._changed.notify_all()

    def _begin(self, lease: Lease) -> OtelSpan:
        job_id, group, generation = lease.job_id, lease.group_index, lease.token
        sampled = self.is_sampled(job_id, group)
        attributes: dict[str, Value] = {
            names.JOB: job_id,
            names.GENERATION: generation,
            names.ATTEMPT: lease.attempt,
            names.WORKER: lease.owner,
            names.SAMPLED: sampled,
            names.MESSAGING_SYSTEM: self._options.broker,
            names.MESSAGING_TYPE: "process",
            names.MESSAGING_OPERATION: str(lease.stage),
        }
        if group is not None:
            attributes[names.GROUP] = group
        links: list[Link] = []
        trace_id = trace_id_of(job_id)
        if lease.attempt > 1:
            # Its span may be nowhere: a worker that is killed sends none.
            before = attempt_span_id(job_id, group, generation - 1)
            links.append(Link(SpanContext(trace_id, before, True, _SAMPLED)))
        with self._ids.given(attempt_span_id(job_id, group, generation), trace_id):
            made = self._tracer.start_span(
                str(lease.stage), _under(_root_of(job_id)), SpanKind.CONSUMER, attributes, links
            )
        span = OtelSpan(self, made, lease, sampled)
        with self._changed:
            self._open.add(span)
        return span

    def child(
        self,
        name: str,
        parent: trace.Span,
        attributes: Attributes,
        begun_ns: int,
        ended_ns: int,
        failed: bool,
    ) -> None:
        under = trace.set_span_in_context(parent, Context())
        span = self._tracer.start_span(name, under, attributes=attributes, start_time=begun_ns)
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(max(begun_ns, ended_ns))

    def is_asked(self, request_id: str) -> bool:
        """Whether a request of a sampled group is sampled."""
        share = self._options.requests
        first = share > 0 and request_id.endswith(_FIRST_REQUEST)
        return first or is_chosen(share, request_id)

    def is_sampled(self, job_id: str, group: int | None) -> bool:
        """Every job's own stages, its first group, and the chosen share of its other groups."""
        if group is None:
            return True
        share = self._options.groups
        return (share > 0 and group == 0) or is_chosen(share, job_id, group)


def _of_job(job: JobRow) -> dict[str, Value]:
    """Attributes of a job: its names only where its texts are kept."""
    attributes: dict[str, Value] = {
        names.JOB: job.job_id,
        names.PRIORITY: job.priority,
        names.PRIVACY: str(job.privacy),
        names.GEN_AI_MODEL: job.verifier,
    }
    if job.privacy.is_full:
        attributes |= {names.JOB_NAME: job.name, names.TENANT: job.tenant}
    return attributes


def _root_of(job_id: str) -> SpanContext:
    return SpanContext(trace_id_of(job_id), root_span_id_of(job_id), True, _SAMPLED)


def _under(parent: SpanContext) -> Context:
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())


def _caller() -> SpanContext | None:
    """The span in which a job is submitted: this process's own, or that of its caller."""
    here = trace.get_current_span().get_span_context()
    if here.is_valid:
        return here
    carrier = {"traceparent": os.environ.get("TRACEPARENT", "")}
    found = TraceContextTextMapPropagator().extract(carrier, Context())
    given = trace.get_current_span(found).get_span_context()
    return given if given.is_valid else None


def _resource() -> Resource:
    """This process; `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` take precedence."""
    host, process = socket.gethostname(), os.getpid()
    ours: dict[str, str | int] = {
        "service.name": "specbatch",
        "service.version": version_here(),
        "service.instance.id": f"{host}:{process}",
        "host.name": host,
        "process.pid": process,
    }
    return Resource.create(ours).merge(OTELResourceDetector().detect())


class OtelSpan(Span):
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
        of_request: dict[str, Value] = {
            names.JOB: self._lease.job_id,
            names.REQUEST_ID: request_id,
            names.ATTEMPT: self._lease.attempt,
            names.GENERATION: self._lease.token,
            **attributes,
        }
        if self._lease.group_index is not None:
            of_request[names.GROUP] = self._lease.group_index
        self._tracing.child(names.REQUEST, self._span, of_request, begun_ns, ended_ns, failed)

    def end(self, error: BaseException | None = None) -> None:
        """End the span as kept, or by an error."""
        if error is None:
            self._end("kept")
        elif isinstance(error, RequestCancelledError):
            self._end("stopped")
        else:
            # The error's kind and what that kind means: its own message may quote a text.
            kind = type(error)
            known = isinstance(error, SpecbatchError) and kind.__doc__
            status = Status(StatusCode.ERROR, known.splitlines()[0] if known else None)
            outcome = "fenced" if isinstance(error, FencedError) else "failed"
            self._end(outcome, status, **{names.ERROR_TYPE: kind.__name__})

    def leave(self) -> None:
        """End the span of an attempt that the process does not wait for."""
        self._end("left", Status(StatusCode.ERROR, "the worker ended before the attempt"))

    def _end(self, outcome: str, status: Status | None = None, **attributes: Value) -> None:
        """The first end is the one that counts."""
        with self._lock:
            if not self._over:
                self._over = True
                self._span.set_attributes({names.OUTCOME: outcome, **attributes})
                if status is not None:
                    self._span.set_status(status)
                self._span.end()
