"""Traces as the pipeline knows them: a span per attempt at a unit, and none unless asked for.

One trace per job. Its root is the span of the submission; attempts to read its input, to process
its groups and to publish are its children, whichever process makes them (`context.py`). This module
imports no OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from specbatch.schemas.records import JobRow, Lease

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]


class Span:
    """An attempt in progress; this one records nothing. Thread-safe; nothing raises."""

    is_on = False  # whether the span is recorded; otherwise attributes need not be computed

    def note(self, attributes: Attributes) -> None: ...

    def event(self, name: str, attributes: Attributes | None = None) -> None: ...

    def has_group(self, index: int) -> bool:  # noqa: ARG002 - none is
        """Whether this group of the job is sampled."""
        return False

    def is_asked(self, request_id: str) -> bool:  # noqa: ARG002 - none is
        """Whether this request of a sampled group is sampled."""
        return False

    def request(
        self, request_id: str, attributes: Attributes, begun_ns: int, ended_ns: int, failed: bool
    ) -> None:
        """A span of one request in this attempt; times are since the epoch."""


class Tracing:
    """The traces of a process; this one traces nothing. Thread-safe; nothing raises."""

    def submitted(self, job: JobRow, created: bool, begun_ns: int) -> None:
        """A job was just stored; `begun_ns` is when its submission began."""

    def attempt(self, lease: Lease) -> AbstractContextManager[Span]:  # noqa: ARG002 - untold
        """The work under a lease. An exception inside ends the span and propagates."""
        return nullcontext(NO_SPAN)

    def close(self) -> None:
        """Send what there is. Work after this is not traced."""


NO_SPAN = Span()
UNTRACED = Tracing()


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Where traces go, and how much of them."""

    to: str  # "otlp", "file:PATH", or nothing
    groups: float  # share of a job's groups; failed attempts are always traced
    requests: float  # share of such a group's requests
    broker: str = "memory"  # as OpenTelemetry names messaging systems
