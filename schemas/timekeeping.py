"""Device time in the store: sessions of workers, and the time that attempts at groups took.

All counters are whole 100-ns units and only grow, so a late or repeated report changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.placement import DEFAULT_POOL
from specbatch.schemas.provenance import TICKS_PER_SEC, Ticks
from specbatch.schemas.records import Lease, Stage

HINTS = 0  # the fencing token of time outside any claim: a claim's is 1 or more

LEASES_OF_SILENCE = 3  # after which a worker counts as dead, and its device no longer counts

# 100-ns units × a price in millionths of a dollar per hour, in a dollar.
UNITS_PER_USD = 1_000_000 * 3600 * TICKS_PER_SEC


def usd_of(units: float) -> float:
    """Dollars for display. Sums that must be exact are computed in whole units first."""
    return units / UNITS_PER_USD


@dataclass(frozen=True, slots=True)
class Device:
    """A worker's leased device (or all devices its engines need at once), and its price."""

    kind: str
    region: str
    tenure: str  # on-demand, reserved or spot
    price_microusd: int  # of an hour
    pool: str = DEFAULT_POOL
    # Of an hour of one of them, for placement; None: nobody has said.
    each_microusd: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class NewSession:
    """A device in a worker process, counted from its start."""

    session_id: str
    owner: str
    device: Device
    age_ticks: int  # its age in 100-ns units
    serves: Serves | None = None  # what it verifies with; None: it verifies nothing


class SessionTime(NamedTuple):
    """A session's cumulative time, in 100-ns units since its start."""

    session_id: str
    seen: int  # its process lived then
    idle: int = 0  # it held no work
    overhead: int = 0  # it held some, and no step of an engine ran


class Attempt(NamedTuple):
    """A claim of a group that uses an engine, or hints for its rows without a claim."""

    job_id: str
    group_index: int
    generation: int
    stage: Stage

    @classmethod
    def of(cls, lease: Lease) -> Attempt:
        assert lease.group_index is not None, "engines work for groups"
        return cls(lease.job_id, lease.group_index, lease.token, lease.stage)


class Spent(NamedTuple):
    """An attempt's time from a session, reported by the write that stores its results."""

    session_id: str
    seen: int  # 100-ns units since the session's start
    ticks: Ticks


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session in the store. When it has ended, `accounted` equals `leased`."""

    session_id: str
    owner: str
    device: Device
    started_at: float  # seconds since the epoch
    ended_at: float | None
    seen: int
    leased: int | None  # 100-ns units; None: the session is open
    idle: int
    overhead: int
    lost: int  # before its end, and never reported
    spent: int  # by attempts
    serves: Serves | None = None

    @property
    def accounted(self) -> int:
        """The sum of all accounted units."""
        return self.idle + self.overhead + self.lost + self.spent


@dataclass(frozen=True, slots=True)
class TimeSlice:
    """The time that an attempt took from one session."""

    session_id: str
    attempt: Attempt
    ticks: Ticks
    kept: bool  # its results were: else the time is lost
    in_flight: bool  # a worker still holds the group
    device: Device


@dataclass(frozen=True, slots=True)
class JobTime:
    """The total time of a job's attempts at a stage with the same result and price."""

    job_id: str
    stage: Stage
    price_microusd: int
    kept: bool
    in_flight: bool
    hints: bool  # for rows that other attempts had
    ticks: Ticks


@dataclass(frozen=True, slots=True)
class RowTime:
    """The total time of a job's completions with the same tag and prices, and their counts."""

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
