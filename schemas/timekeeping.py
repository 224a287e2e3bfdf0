"""Device time as the store keeps it: sessions of workers, and what attempts at groups had of them.

All counters are whole ticks and only grow; to tell one twice, or late, changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.provenance import TICKS_PER_SEC, Ticks
from specbatch.schemas.records import Lease, Stage

HINTS = 0  # the generation of time that no claim of a group had: a claim's is 1 or more

LEASES_OF_SILENCE = 3  # after which a worker is held for dead, and its device no longer counted

# Ticks × a price in millionths of a dollar per hour, in a dollar.
UNITS_PER_USD = 1_000_000 * 3600 * TICKS_PER_SEC


def usd_of(units: float) -> float:
    """For showing: what must add up is summed in whole units first."""
    return units / UNITS_PER_USD


@dataclass(frozen=True, slots=True)
class Device:
    """What a worker has leased, or all of what its engines need at once, and its price."""

    kind: str
    region: str
    tenure: str  # on-demand, reserved or spot
    price_microusd: int  # of an hour


@dataclass(frozen=True, slots=True)
class NewSession:
    """A device in a worker process, from some moment on."""

    session_id: str
    owner: str
    device: Device
    age_ticks: int  # how long ago that moment was
    serves: Serves | None = None  # what it verifies with; None: it verifies nothing


class SessionTime(NamedTuple):
    """How far a session has come, in ticks since its beginning."""

    session_id: str
    seen: int  # its process lived then
    idle: int = 0  # it held no work
    overhead: int = 0  # it held some, and no step of an engine ran


class Attempt(NamedTuple):
    """A claim of a group that has an engine work; or hints for rows of it, without a claim."""

    job_id: str
    group_index: int
    generation: int
    stage: Stage

    @classmethod
    def of(cls, lease: Lease) -> Attempt:
        assert lease.group_index is not None, "engines work for groups"
        return cls(lease.job_id, lease.group_index, lease.generation, lease.stage)


class Spent(NamedTuple):
    """What an attempt has had of a session, told by the write that keeps its results."""

    session_id: str
    seen: int  # ticks since the session's beginning
    ticks: Ticks


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session as the store knows it. Once it has ended, `accounted` and `leased` are equal."""

    session_id: str
    owner: str
    device: Device
    started_at: float  # seconds since the epoch
    ended_at: float | None
    seen: int
    leased: int | None  # ticks; None: it goes on
    idle: int
    overhead: int
    lost: int  # before its end, and told by nobody
    spent: int  # by attempts
    serves: Serves | None = None

    @property
    def accounted(self) -> int:
        """Ticks that are somewhere."""
        return self.idle + self.overhead + self.lost + self.spent


@dataclass(frozen=True, slots=True)
class TimeSlice:
    """What an attempt had of one session."""

    session_id: str
    attempt: Attempt
    ticks: Ticks
    kept: bool  # its results were: else the time is lost
    in_flight: bool  # somebody holds it still
    device: Device


@dataclass(frozen=True, slots=True)
class JobTime:
    """What attempts of one job, that came to the same and had the same price, had together."""

    job_id: str
    price_microusd: int
    kept: bool
    in_flight: bool
    hints: bool  # for rows that other attempts had
    ticks: Ticks


@dataclass(frozen=True, slots=True)
class RowTime:
    """What a job's completions of one tag and of the same prices were given, and what they are."""

    job_id: str
    tag: str | None
    price_microusd: int
    ahead_price_microusd: int
    ticks: Ticks
    ahead_ticks: int
    documents: int
    completions: int
    prompt_tokens: int  # of the documents
    completion_tokens: int
    accepted: int
