"""Traces as the pipeline knows them: a span per attempt at a unit, and nothing where nobody asked.

One trace per job. Its root is the span of the submission; attempts at reading its input, at its
groups and at publishing lie right under that, whichever process makes them (`context.py`). This
module imports no OpenTelemetry.
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
    """An attempt, as it goes on. Thread-safe; nothing raises."""

    @property
    def is_on(self) -> bool:
        """Whether anybody hears of it: else attributes need not be made."""
        ...

    def note(self, attributes: Attributes) -> None: ...

    def event(self, name: str, attributes: Attributes | None = None) -> None: ...

    def has_group(self, index: int) -> bool:
        """Whether this group of the job is one of those that are told of."""
        ...

    def is_asked(self, request_id: str) -> bool:
        """Whether this request is one of those of such a group."""
        ...

    def request(
        self, request_id: str, attributes: Attributes, begun_ns: int, ended_ns: int, failed: bool
    ) -> None:
        """A span of one request in this attempt; times are since the epoch."""
        ...


class Tracing(Protocol):
    """What a process tells of its work. Thread-safe; nothing raises."""

    def submitted(self, job: JobRow, created: bool, begun_ns: int) -> None:
        """A job is in the store, since now; `begun_ns` is when that was begun."""
        ...

    def attempt(self, lease: Lease) -> AbstractContextManager[Span]:
        """The work under a lease. What is raised inside is the end of the span, and goes on."""
        ...

    def close(self) -> None:
        """Send what there is. Whoever works on is not heard of any more."""
        ...


class NoSpan:
    """Nobody listens."""

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
    """Tells nothing."""

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
    groups: float  # share of a job's groups; those that fail are always told of
    requests: float  # share of such a group's requests
    broker: str = "memory"  # as OpenTelemetry names messaging systems
