"""`tenants`: what tenants have spent, and the budgets that limit them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.table import Table

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import moment, remark, say, say_json, show_whole
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger import budget_rules
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.fair_share import DEFAULT_WEIGHT
from specbatch.schemas.budgets import Account, Budget, Period
from specbatch.schemas.errors import UsageError
from specbatch.schemas.privacy import checked_tenant

MOST_TOKENS = 1 << 53  # a whole number in every JSON reader


class Action(StrEnum):
    """What to do."""

    LIST = "list"
    SET = "set"
    REMOVE = "remove"


def tenants(
    action: Annotated[
        Action, typer.Argument(metavar="list|set|remove", help="what to do")
    ] = Action.LIST,
    tenant: Annotated[
        str | None,
        typer.Argument(metavar="[TENANT]", help="with set and remove: whose", show_default=False),
    ] = None,
    period: Annotated[
        Period | None,
        typer.Option(
            "--period",
            help="with set and remove: of which budget; days and months are of UTC",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", help="with set: most tokens of prompts and outputs", show_default=False
        ),
    ] = None,
    usd: Annotated[
        float | None,
        typer.Option("--usd", help="with set: most dollars", show_default=False),
    ] = None,
    reason: Annotated[
        str,
        typer.Option(
            "--reason",
            help="with set and remove: why; the history keeps it",
            show_default=False,
        ),
    ] = "",
    history: Annotated[
        bool, typer.Option("--history", help="with list: every budget there ever was")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="with list: one JSON array on one line")
    ] = False,
) -> None:
    """Show what tenants have spent, reserved and left; set and remove their budgets.

    A group is verified only if its tenant's budgets cover it. Jobs wait for the next day or month,
    and stop when a budget in all is spent.
    """
    _check(action, tenant, period, tokens, usd, reason, lists=history or json)
    settings = load_settings()
    with closing(make_store(settings)) as store:
        if action is Action.LIST and history:
            _list_history(store.budgets(history=True), json)
        elif action is Action.LIST:
            _list(store.tenant_accounts(), settings.tenant_weights, json)
        elif period is None or tenant is None:
            raise UsageError(f"`specbatch tenants {action}` needs a tenant and --period")
        elif action is Action.SET:
            _set(store, tenant, period, tokens, usd, reason.strip())
        else:
            _remove(store, tenant, period, reason.strip())


def _check(
    action: Action,
    tenant: str | None,
    period: Period | None,
    tokens: int | None,
    usd: float | None,
    reason: str,
    lists: bool,
) -> None:
    given = tenant is not None or period is not None or bool(reason)
    if action is Action.LIST:
        if given or tokens is not None or usd is not None:
            raise UsageError("`specbatch tenants list` lists all tenants: leave the rest out")
        return
    if lists:
        raise UsageError("--history and --json are for `specbatch tenants list`: leave them out")
    if tenant is None or period is None:
        raise UsageError(f"`specbatch tenants {action}` needs a tenant and --period")
    checked_tenant(tenant)
    if not reason.strip():
        raise UsageError(
            f"`specbatch tenants {action}` needs --reason, which is kept in the history"
        )
    _check_amounts(action, tokens, usd)


def _check_amounts(action: Action, tokens: int | None, usd: float | None) -> None:
    if action is Action.REMOVE:
        if tokens is not None or usd is not None:
            raise UsageError("--tokens and --usd are for `specbatch tenants set`: leave them out")
        return
    if tokens is None and usd is None:
        raise UsageError("`specbatch tenants set` needs --tokens, --usd or both")
    if tokens is not None and not 1 <= tokens <= MOST_TOKENS:
        raise UsageError(f"--tokens must be from 1 to {MOST_TOKENS:,} (got {tokens:,})")
    if usd is not None and not (math.isfinite(usd) and usd > 0):
        raise UsageError(f"--usd must be above 0 (got {usd:g})")


def _set(
    store: Store,
    tenant: str,
    period: Period,
    tokens: int | None,
    usd: float | None,
    reason: str,
) -> None:
    budget = store.set_budget(tenant, period, tokens, usd, reason)
    (found,) = store.tenant_accounts(tenant)
    say(f"tenant {tenant} has {_line(found, budget)}")


def _remove(store: Store, tenant: str, period: Period, reason: str) -> None:
    if store.remove_budget(tenant, period, reason) is None:
        raise UsageError(
            f"tenant {tenant} has no budget for {period}: `specbatch tenants` lists those there are"
        )
    say(f"tenant {tenant} has no budget for {period} any more; jobs that stopped need a retry")


def _list(accounts: Sequence[Account], weights: Mapping[str, float], json: bool) -> None:
    if json:
        say_json([_values(account, weights) for account in accounts])
        return
    if not accounts:
        remark("nothing is recorded yet, and no tenant has a budget")
        return
    table = Table("tenant", "share", "tokens today", "this month", "in all", "reserved", "dollars")
    for one in accounts:
        tokens = (f"{one.spent[period].tokens:,}" for period in Period)
        share = f"{weights.get(one.tenant, DEFAULT_WEIGHT):g}"
        dollars = f"{one.spent[Period.TOTAL].usd:.4f}"
        table.add_row(one.tenant, share, *tokens, f"{one.reserved_tokens:,}", dollars)
    show_whole(table)
    for one in accounts:
        for budget in one.budgets:
            say(f"{one.tenant}: {_line(one, budget)}")


def _line(account: Account, budget: Budget) -> str:
    """A budget, what is left of it, and who set it."""
    tokens = budget_rules.left_tokens(account, budget)
    usd = budget_rules.left_usd(account, budget)
    left = [] if tokens is None else [f"{max(0, tokens):,} tokens"]
    left += [] if usd is None else [f"${max(0.0, usd):.4f}"]
    guess = "" if usd is None or not account.reserved_usd else _guess(account)
    allowed = f"{budget_rules.amounts(budget)} {budget_rules.per(budget.period)}"
    return (
        f"a budget of {allowed}, {' and '.join(left)} left{guess}; "
        f"set at {moment(budget.set_at)} by {budget.set_by}: {budget.reason}"
    )


def _guess(account: Account) -> str:
    """What in the dollars that are left is an estimate."""
    return f" if the groups under way cost ${account.reserved_usd:.4f}, as estimated"


def _values(account: Account, weights: Mapping[str, float]) -> dict[str, Any]:
    return {
        "tenant": account.tenant,
        "share": weights.get(account.tenant, DEFAULT_WEIGHT),
        "spent": {period.value: asdict(account.spent[period]) for period in Period},
        "reserved_tokens": account.reserved_tokens,
        "reserved_usd": account.reserved_usd,
        "budgets": [
            asdict(budget)
            | {
                "left_tokens": budget_rules.left_tokens(account, budget),
                "left_usd": budget_rules.left_usd(account, budget),
            }
            for budget in account.budgets
        ],
    }


def _list_history(budgets: Sequence[Budget], json: bool) -> None:
    if json:
        say_json([asdict(budget) for budget in budgets])
        return
    for one in budgets:
        until = ""
        if one.ended_at is not None:
            until = f"; until {moment(one.ended_at)}, ended by {one.ended_by}: {one.end_reason}"
        what = f"{one.tenant}: {budget_rules.amounts(one)}, {one.period}"
        say(f"{what}, set at {moment(one.set_at)} by {one.set_by}: {one.reason}{until}")
    if not budgets:
        remark("no tenant ever had a budget")
