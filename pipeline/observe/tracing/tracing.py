"""Traces as the pipeline knows them: a span per attempt at a unit, and none unless asked for.

One trace per job. Its root is the span of the submission; attempts to read its input, to process
its groups and to publish are its children, whichever process makes them (`context.py`). This module
imports no OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from specbatch.schemas.records import JobRow, Lease

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]


class Span(Protocol):
    """An attempt in progress. Thread-safe; nothing raises."""

    @property
    def is_on(self) -> bool:
        """Whether the span is recorded; otherwise attributes need not be computed."""
        ...

    def note(self, attributes: Attributes) -> None: ...

    def event(self, name: str, attributes: Attributes | None = None) -> None: ...

    def has_group(self, index: int) -> bool:
        """Whether this group of the job is sampled."""
        ...

    def is_asked(self, request_id: str) -> bool:
        """Whether this request of a sampled group is sampled."""
        ...

    def request(
        self, request_id: str, attributes: Attributes, begun_ns: int, ended_ns: int, failed: bool
    ) -> None:
        """A span of one request in this attempt; times are since the epoch."""
        ...


class Tracing(Protocol):
    """The traces of a process. Thread-safe; nothing raises."""

    def submitted(self, job: JobRow, created: bool, begun_ns: int) -> None:
        """A job was just stored; `begun_ns` is when its submission began."""
        ...

    def attempt(self, lease: Lease) -> AbstractContextManager[Span]:
        """The work under a lease. An exception inside ends the span and propagates."""
        ...

    def close(self) -> None:
        """Send what there is. Work after this is not traced."""
        ...


class NoSpan:
    """The span where nothing is traced."""

    is_on = False

    def note(self, attributes: Attributes) -> None: ...

    def event(self, name: str, attributes: Attributes | None = None) -> None: ...

    def has_group(self, index: int) -> bool:  # noqa: ARG002 - none is
        return False

    def is_asked(self, request_id: str) -> bool:  # noqa: ARG002 - none is
        return False

    def request(
        self, request_id: str, attributes: Attributes, begun_ns: int, ended_ns: int, failed: bool
    ) -> None: ...


class Untraced:
    """Traces nothing."""

    def submitted(self, job: JobRow, created: bool, begun_ns: int) -> None: ...

    def attempt(self, lease: Lease) -> AbstractContextManager[Span]:  # noqa: ARG002 - untold
        return nullcontext(NO_SPAN)

    def close(self) -> None: ...


NO_SPAN = NoSpan()
UNTRACED = Untraced()


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Where traces go, and how much of them."""

    to: str  # "otlp", "file:PATH", or nothing
    groups: float  # share of a job's groups; failed attempts are always traced
    requests: float  # share of such a group's requests
    broker: str = "memory"  # as OpenTelemetry names messaging systems
