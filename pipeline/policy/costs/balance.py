"""Where the time and the money of workers went: sums in whole units, which add up.

A job's attempts had some time of sessions. What its rows were given is theirs, by kind; the rest
was lost: attempts that came to nothing, drafts that nobody used, rows that a stopped job did not
keep. Hints for rows that other attempts had count as overhead, for nobody knows which were of use.
While a job runs, what is in flight or not recorded yet is pending. What no job had of a session,
it was idle or had overhead, or was lost with its process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from specbatch.schemas.provenance import TICKS_PER_SEC, Ticks, TimeKind
from specbatch.schemas.timekeeping import JobTime, RowTime, SessionRow, usd_of


@dataclass(frozen=True, slots=True)
class Amount:
    """Time, and what it cost."""

    ticks: int = 0
    units: int = 0  # ticks × price: see `usd_of`

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.ticks + other.ticks, self.units + other.units)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.ticks - other.ticks, self.units - other.units)

    @property
    def sec(self) -> float:
        return self.ticks / TICKS_PER_SEC

    @property
    def usd(self) -> float:
        return usd_of(self.units)


NOTHING = Amount()


@dataclass(frozen=True, slots=True)
class Sheet:
    """What time went into, by kind."""

    parts: Mapping[TimeKind, Amount] = field(default_factory=dict)
    pending: Amount = NOTHING

    def __add__(self, other: Sheet) -> Sheet:
        parts = {kind: self.of(kind) + other.of(kind) for kind in TimeKind}
        return Sheet(parts, self.pending + other.pending)

    def of(self, *kinds: TimeKind) -> Amount:
        return sum((self.parts.get(kind, NOTHING) for kind in kinds), NOTHING)

    @property
    def total(self) -> Amount:
        return self.of(*TimeKind) + self.pending


def at(ticks: int, price_microusd: int) -> Amount:
    return Amount(ticks, ticks * price_microusd)


def by_kind(ticks: Ticks, price_microusd: int) -> Sheet:
    """The fields of `Ticks` are kinds."""
    named = ((TimeKind(f.name), getattr(ticks, f.name)) for f in fields(Ticks))
    return Sheet({kind: at(value, price_microusd) for kind, value in named})


def rows_sheet(rows: Iterable[RowTime]) -> Sheet:
    """What rows were given. What was written ahead for them was drafting."""
    total = Sheet()
    for row in rows:
        total += by_kind(row.ticks, row.price_microusd)
        total += Sheet({TimeKind.DRAFT: at(row.ahead_ticks, row.ahead_price_microusd)})
    return total


def job_sheet(times: Iterable[JobTime], rows: Iterable[RowTime], is_final: bool) -> Sheet:
    """Everything that a job had. Its total is that of `times`."""
    given = rows_sheet(rows)
    kept = lost = pending = hints = NOTHING
    for time in times:
        amount = at(time.ticks.total, time.price_microusd)
        if time.kept:
            kept += amount
        elif time.hints:
            hints += amount
        elif time.in_flight:
            pending += amount
        else:
            lost += amount
    unrecorded = kept - given.total
    if is_final:
        lost += unrecorded
    else:
        pending += unrecorded
    return given + Sheet({TimeKind.OVERHEAD: hints, TimeKind.LOST: lost}, pending)


def sessions_sheet(sessions: Iterable[SessionRow]) -> Sheet:
    """What no job had of them."""
    total = Sheet()
    for session in sessions:
        price = session.device.price_microusd
        total += Sheet(
            {
                TimeKind.IDLE: at(session.idle, price),
                TimeKind.OVERHEAD: at(session.overhead, price),
                TimeKind.LOST: at(session.lost, price),
            }
        )
    return total


def leased(sessions: Sequence[SessionRow]) -> Amount:
    """What there was to give out. Of a session that continues, what is accounted for."""
    return sum(
        (
            at(s.accounted if s.leased is None else s.leased, s.device.price_microusd)
            for s in sessions
        ),
        NOTHING,
    )
