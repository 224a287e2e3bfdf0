"""Spans as tests look at them: read from files, or taken by an endpoint of a test's own."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

ERROR = 2  # status codes of OTLP
CONSUMER = 5


@dataclass(frozen=True)
class Told:
    """One span."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    begun_ns: int
    ended_ns: int
    status: int
    said: str  # of the status
    attributes: Mapping[str, Any]
    events: tuple[tuple[str, Mapping[str, Any]], ...]
    links: tuple[str, ...]  # ids of spans
    process: Mapping[str, Any]

    @property
    def request(self) -> str | None:
        return self.attributes.get("specbatch.request.id")


def read_traces(*paths: Path) -> list[Told]:
    """All spans of trace files, as they were written."""
    lines = (line for path in paths if path.exists() for line in path.read_text().splitlines())
    return [span for line in lines for span in _of_json(json.loads(line))]


def _of_json(request: Mapping[str, Any]) -> Iterator[Told]:
    for resource in request["resourceSpans"]:
        process = _plain(resource["resource"]["attributes"])
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                status = span.get("status", {})
                yield Told(
                    name=span["name"],
                    trace_id=span["traceId"],
                    span_id=span["spanId"],
                    parent_id=span.get("parentSpanId", ""),
                    kind=span["kind"],
                    begun_ns=int(span["startTimeUnixNano"]),
                    ended_ns=int(span["endTimeUnixNano"]),
                    status=status.get("code", 0),
                    said=status.get("message", ""),
                    attributes=_plain(span.get("attributes", ())),
                    events=tuple(
                        (event["name"], _plain(event.get("attributes", ())))
                        for event in span.get("events", ())
                    ),
                    links=tuple(link["spanId"] for link in span.get("links", ())),
                    process=process,
                )


def _plain(pairs: Any) -> dict[str, Any]:
    return {pair["key"]: _value(pair["value"]) for pair in pairs}


def _value(value: Mapping[str, Any]) -> Any:
    ((kind, found),) = value.items()
    if kind == "arrayValue":
        return [_value(one) for one in found["values"]]
    return int(found) if kind == "intValue" else found


@dataclass
class Receiver:
    """An OTLP endpoint, and what it was sent."""

    url: str
    status: int = 200
    headers: list[Mapping[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    spans: list[Any] = field(default_factory=list)  # protobuf
    resources: list[Any] = field(default_factory=list)

    def take(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        self.paths.append(path)
        self.headers.append(headers)
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            self.resources.append(resource.resource)
            for scope in resource.scope_spans:
                self.spans += scope.spans


@contextmanager
def receiver() -> Iterator[Receiver]:
    """A real HTTP server on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if found.status == 200:
                found.take(self.path, dict(self.headers), body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(found.status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Receiver(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
