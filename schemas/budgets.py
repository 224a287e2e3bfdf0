"""What tenants may spend, by period, and what they have spent and reserved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Period(StrEnum):
    """For how long a budget is. Days and months are those of UTC."""

    DAY = "day"
    MONTH = "month"
    TOTAL = "total"


@dataclass(frozen=True, slots=True)
class Budget:
    """What a tenant may spend in a period, from `set_at` until `ended_at`."""

    tenant: str
    period: Period
    tokens: int | None  # of prompts and outputs; None: any number
    usd: float | None  # None: any amount
    set_at: float  # seconds since the epoch, by the store
    set_by: str
    reason: str
    ended_at: float | None = None  # None: it holds now
    ended_by: str | None = None
    end_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """What the records of a tenant's completions amount to. Copies cost nothing."""

    tokens: int = 0  # of prompts and outputs
    usd: float = 0.0  # what the completions were charged


@dataclass(frozen=True, slots=True)
class Account:
    """A tenant at one moment: its budgets, what is booked, and what is reserved."""

    tenant: str
    at: float  # seconds since the epoch, by the store
    budgets: tuple[Budget, ...]  # at most one for each period, in the order of `Period`
    spent: Mapping[Period, Spent]  # in the present day and month, and in all
    reserved_tokens: int  # the most that groups under way may take

    @property
    def reserved_usd(self) -> float:
        """What these tokens will cost, at the tenant's price of a token so far."""
        total = self.spent[Period.TOTAL]
        return self.reserved_tokens * total.usd / total.tokens if total.tokens else 0.0


class LeastTokens(NamedTuple):
    """What a new job must be allowed to take."""

    of_row: int = 0  # any of its rows, whatever its prompt
    in_all: int = 0  # all rows that are known of


NOTHING_SURE = LeastTokens()


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A live job none of whose groups can be claimed for VERIFY, by its tenant's budgets."""

    job_id: str
    period: Period  # of the budget that does not cover it
    words: str  # what it waits for
    is_final: bool  # waiting does not help: the job stops …
    reason: str  # … for this reason
