"""Switches by which an operator turns drafting off, to verifier-only, for a part of the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class RowScope(NamedTuple):
    """Whose a row is. Empty: nobody's in particular."""

    tenant: str = ""
    job_name: str = ""
    tag: str = ""


ANY_ROW = RowScope()


@dataclass(frozen=True, slots=True)
class SwitchScope:
    """What a switch covers: whatever has all of these values. Empty: any value."""

    tenant: str = ""
    job_name: str = ""
    tag: str = ""
    proposer: str = ""  # a proposer's name; `draft-model` stands for all draft models

    def covers(self, row: RowScope, proposer: str) -> bool:
        names = ("", proposer, proposer.partition("@")[0])
        return (
            self.concerns(row.tenant, row.job_name)
            and self.tag in ("", row.tag)
            and self.proposer in names
        )

    def concerns(self, tenant: str, job_name: str) -> bool:
        """Whether it covers anything of a job."""
        return self.tenant in ("", tenant) and self.job_name in ("", job_name)

    @property
    def narrowed_by(self) -> dict[str, str]:
        """The values that it has, by what they are called."""
        named = {
            "tenant": self.tenant,
            "job": self.job_name,
            "tag": self.tag,
            "proposer": self.proposer,
        }
        return {name: value for name, value in named.items() if value}

    @property
    def kind(self) -> str:
        """By what it is narrowed, without the values."""
        return "+".join(self.narrowed_by) or "everything"

    def __str__(self) -> str:
        return ", ".join(f"{k} {v}" for k, v in self.narrowed_by.items()) or "everything"


@dataclass(frozen=True, slots=True)
class DraftSwitch:
    """Drafting is off for a scope, from `off_at` until `on_at`."""

    scope: SwitchScope
    off_at: float  # seconds since the epoch, by the store
    off_by: str
    reason: str
    on_at: float | None = None  # None: it is off now
    on_by: str | None = None


@dataclass(frozen=True, slots=True)
class OffHere:
    """A draft model does not pay beside this process's verifier in a numeric class."""

    proposer: str  # its full name
    numeric_class: str  # empty: the two do not fit, whatever the class
    switch: DraftSwitch


@dataclass(frozen=True, slots=True)
class DraftSwitches:
    """All that is switched off now. Any switch that covers a row and a proposer is enough."""

    active: tuple[DraftSwitch, ...] = ()
    here: tuple[OffHere, ...] = ()

    @property
    def all(self) -> tuple[DraftSwitch, ...]:
        return (*self.active, *(one.switch for one in self.here))

    def in_class(self, numeric_class: str | None) -> DraftSwitches:
        """Those that count for an engine of this class."""
        here = tuple(one for one in self.here if one.numeric_class in ("", numeric_class))
        return self if here == self.here else DraftSwitches(self.active, here)

    def of(self, row: RowScope, proposer: str) -> DraftSwitch | None:
        """The switch by which a proposer may not draft for a row; None: it may."""
        here = (one.switch for one in self.here if one.proposer == proposer)
        return self.by_operator(row, proposer) or next(here, None)

    def by_operator(self, row: RowScope, proposer: str) -> DraftSwitch | None:
        return next((s for s in self.active if s.scope.covers(row, proposer)), None)

    def is_off(self, row: RowScope, proposer: str) -> bool:
        return self.of(row, proposer) is not None


ALL_ON = DraftSwitches()
