"""What budgets cover. Pure: no SQL, no clock.

A group is claimed for VERIFY only if the tokens that are left cover its *bound*: the prompt tokens
and `max_tokens` of all its samples. The bound is reserved until the group is recorded or given
back, so that what is spent and what is reserved never exceed a budget of tokens together.

Money is not known beforehand. A group is claimed while what is booked, and what groups under way
will cost at the tenant's price so far, are below the budget. So a budget of money may be exceeded
by what the groups under way cost, and by no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from specbatch.pipeline.observe.units import usd
from specbatch.schemas.budgets import Account, Budget, LeastTokens, Period, Shortfall
from specbatch.schemas.days import DAY_SEC

_STOPPED = "its tenant's budget "


def first_day(period: Period, at: float) -> int:
    """The day, in days since the epoch, on which the present period began; 0 for TOTAL."""
    if period is Period.TOTAL:
        return 0
    day = int(at // DAY_SEC)
    return day if period is Period.DAY else day - datetime.fromtimestamp(at, UTC).day + 1


def next_begins_at(period: Period, at: float) -> float | None:
    """When the next period begins; None: there is no other."""
    if period is Period.TOTAL:
        return None
    if period is Period.DAY:
        return (int(at // DAY_SEC) + 1) * DAY_SEC
    now = datetime.fromtimestamp(at, UTC)
    year, month = divmod(now.year * 12 + now.month, 12)
    return datetime(year, month + 1, 1, tzinfo=UTC).timestamp()


def left_tokens(account: Account, budget: Budget) -> int | None:
    """Tokens that can still be reserved; below 0 after a budget was lowered. None: any number."""
    if budget.tokens is None:
        return None
    return budget.tokens - account.spent[budget.period].tokens - account.reserved_tokens


def left_usd(account: Account, budget: Budget) -> float | None:
    """The same of money, where reservations are estimates."""
    if budget.usd is None:
        return None
    return budget.usd - account.spent[budget.period].usd - account.reserved_usd


def room(account: Account) -> int | None:
    """The largest bound of a group that may be claimed now; None: any. 0: no group may."""
    rooms = [room_of(account, budget) for budget in account.budgets]
    return min((tokens for tokens in rooms if tokens is not None), default=None)


def room_of(account: Account, budget: Budget) -> int | None:
    """The same, by one of the budgets."""
    usd, tokens = left_usd(account, budget), left_tokens(account, budget)
    if usd is not None and usd <= 0:
        return 0
    return None if tokens is None else max(0, tokens)


def shortfall(
    job_id: str, account: Account, bound: int, to_come: int | None = None
) -> Shortfall | None:
    """Of a job whose smallest group has this bound, 0 if it has its reservation; None: it is
    covered. Of several budgets that do not cover it, one that never will counts, else the one that
    lasts longest. `to_come`: the smallest bound that a group of the job may yet have."""
    held = [b for b in account.budgets if bound and not _covers(room_of(account, b), bound)]
    if not held:
        return None
    least = bound if to_come is None else min(bound, to_come)
    never = [budget for budget in held if is_final(account, budget, least)]
    budget = (never or held)[-1]
    waits = waits_because(account, budget, bound, is_final(account, budget, bound) and not never)
    return Shortfall(
        job_id, budget.period, waits, bool(never), stops_because(account, budget, bound)
    )


def _covers(room: int | None, bound: int) -> bool:
    return room is None or bound <= room


def is_final(account: Account, budget: Budget, bound: int) -> bool:
    """Whether this group is never covered, however long it waits.

    Not while other groups are under way: they may take less than was reserved for them.
    """
    if account.reserved_tokens:
        return False
    if budget.period is not Period.TOTAL:
        return budget.tokens is not None and bound > budget.tokens
    return not _covers(room_of(account, budget), bound)


def amounts(budget: Budget) -> str:
    """`10,000 tokens and $5`."""
    tokens = [] if budget.tokens is None else [f"{budget.tokens:,} tokens"]
    return " and ".join(tokens + ([] if budget.usd is None else [usd(budget.usd)]))


def per(period: Period) -> str:
    """`a day`, `a month`, `in all`."""
    return "in all" if period is Period.TOTAL else f"a {period}"


def _named(budget: Budget) -> str:
    return f"of {amounts(budget)} {per(budget.period)}"


def _lack(account: Account, budget: Budget, bound: int) -> str:
    """What there is of a budget, and what a group needs."""
    left = left_usd(account, budget)
    if left is not None and left <= 0:
        spent = account.spent[budget.period].usd
        way = f", and {usd(account.reserved_usd)} is under way" if account.reserved_tokens else ""
        return f"{usd(spent)} is spent{way}"
    tokens = max(0, left_tokens(account, budget) or 0)
    way = f", {account.reserved_tokens:,} are reserved" if account.reserved_tokens else ""
    return f"{tokens:,} tokens are left{way}, and its smallest group may take {bound:,}"


def waits_because(account: Account, budget: Budget, bound: int, for_others: bool = False) -> str:
    """What a job waits for, as `Backlog.waiting` says it. `for_others`: for groups that are not at
    VERIFY yet."""
    until = next_begins_at(budget.period, account.at)
    if account.reserved_tokens:
        then = "groups under way may give some back"
    elif for_others:
        then = "groups to come may take less"
    elif until is None:
        then = "it is about to stop"
    else:
        then = f"the next {budget.period} begins at {_time(until)}"
    return f"waits for {_STOPPED}{_named(budget)}: {_lack(account, budget, bound)}; {then}"


def stops_because(account: Account, budget: Budget, bound: int) -> str:
    """The reason of a job that stops. `stopped_by_tenant` knows it again."""
    if budget.period is not Period.TOTAL:
        return (
            f"{_STOPPED}{_named(budget)} is less than its smallest group may take, {bound:,} "
            "tokens: a smaller group_size or max_tokens fits"
        )
    return f"{_STOPPED}{_named(budget)} is spent: {_lack(account, budget, bound)}"


def stopped_by_tenant(stop_reason: str | None) -> bool:
    """Whether this is why a job was stopped."""
    return stop_reason is not None and stop_reason.startswith(_STOPPED)


def refusals(account: Account, least: LeastTokens) -> Iterator[str]:
    """Why a new job cannot be done, by budget."""
    for budget in account.budgets:
        is_total = budget.period is Period.TOTAL
        spent = account.spent[budget.period]
        if is_total and budget.usd is not None and spent.usd >= budget.usd:
            yield f"the budget {_named(budget)} is spent"
        if budget.tokens is None:
            continue
        left = max(0, budget.tokens - spent.tokens) if is_total else budget.tokens
        has = f"{left:,} tokens are left of the budget {_named(budget)}"
        if not is_total:
            has = f"the budget is {_named(budget)}"
        if least.of_row > left:
            yield f"{has}, and one row may take {least.of_row:,}: lower max_tokens"
        elif is_total and least.in_all > left:
            yield f"{has}, and its rows take {least.in_all:,} at least"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
