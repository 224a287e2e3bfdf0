"""What a thread works on, and its ids in the traces and logs of all processes.

Ids follow from the job's id, and those of an attempt from its fencing token. So no message has to
carry them, every process continues the same trace, and a log line names the span that it belongs
to, even when nothing is traced.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256

from specbatch.schemas.records import Lease

_ALL = 1 << 64


@dataclass(frozen=True, slots=True)
class CurrentWork:
    """A unit of work, as far as it is known: before its claim it has no fencing token."""

    job_id: str
    stage: str
    group: int | None = None
    generation: int | None = None
    attempt: int | None = None
    worker: str | None = None

    @classmethod
    def of(cls, lease: Lease) -> CurrentWork:
        unit = (lease.job_id, str(lease.stage), lease.group_index)
        return cls(*unit, lease.token, lease.attempt, lease.owner)

    @property
    def span_id(self) -> int | None:
        if self.generation is None:
            return None
        return attempt_span_id(self.job_id, self.group, self.generation)


_work: ContextVar[CurrentWork | None] = ContextVar("specbatch_work", default=None)


def work_on(work: CurrentWork) -> None:
    """Say what this thread works on from here on. It stays set after the work's end, because the
    caller logs what a task raised."""
    _work.set(work)


def current_work() -> CurrentWork | None:
    """What this thread works on, or last worked on."""
    return _work.get()


def trace_id_of(job_id: str) -> int:
    """128 bits, never 0."""
    return int.from_bytes(_digest(job_id)[:16]) or 1


def root_span_id_of(job_id: str) -> int:
    """64 bits, never 0: the span above all others of a job."""
    return int.from_bytes(_digest(job_id)[16:24]) or 1


def attempt_span_id(job_id: str, group: int | None, generation: int) -> int:
    """64 bits, never 0: the span of the attempt with this fencing token."""
    return int.from_bytes(_digest(job_id, "attempt", group, generation)[:8]) or 1


def is_chosen(share: float, *what: object) -> bool:
    """Whether this is in a share (0 to 1) of its kind; all processes agree."""
    return int.from_bytes(_digest("choice", *what)[:8]) < share * _ALL


def _digest(*parts: object) -> bytes:
    return sha256("\0".join(map(str, parts)).encode()).digest()
