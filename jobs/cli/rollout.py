"""`specbatch rollout …`: a candidate draft model beside the one that is deployed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer
from rich.table import Table

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import moment, say, say_json, show_whole
from specbatch.jobs.cli.models import check_fits, given
from specbatch.jobs.cli.options import ForJob, ForTag, ForTenant
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.learning.registry import find
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.policy.ratios import Interval
from specbatch.pipeline.policy.rollout import figures_of
from specbatch.schemas.errors import UsageError
from specbatch.schemas.fingerprint import shown
from specbatch.schemas.registry import DeployScope
from specbatch.schemas.rollouts import DEFAULT_STEPS, Rollout, shares_of

DEFAULT_PERCENTS = ",".join(f"{100 * share:g}" for share in DEFAULT_STEPS)


class Action(StrEnum):
    """What to do."""

    LIST = "list"
    START = "start"
    SHOW = "show"
    STOP = "stop"
    SETTLE = "settle"


_SCOPED = (Action.START, Action.STOP)
_PRINTED = (Action.LIST, Action.SHOW)


def rollout(
    action: Annotated[
        Action, typer.Argument(metavar="list|start|show|stop|settle", help="what to do")
    ] = Action.LIST,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="with start: NAME, NAME:VERSION or a fingerprint; with show and stop: a rollout's "
            "number",
            show_default=False,
        ),
    ] = None,
    tenant: ForTenant = "",
    job: ForJob = "",
    tag: ForTag = "",
    steps: Annotated[
        str,
        typer.Option(
            "--steps",
            help="with start: percent of groups, one after the other; at 0 the candidate drafts in "
            "shadow",
        ),
    ] = DEFAULT_PERCENTS,
    reason: Annotated[
        str,
        typer.Option(
            "--reason", help="with start and stop: why; the history keeps it", show_default=False
        ),
    ] = "",
    history: Annotated[
        bool, typer.Option("--history", help="with list: also rollouts that have ended")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="with list and show: one JSON value on one line")
    ] = False,
) -> None:
    """Try a candidate draft model on a growing share of groups; promote it if it earns more.

    Chance draws the groups. A candidate with fewer tokens per device second
    ends at once; one with more drafts for all groups, and the next `specbatch learn`, local job or
    `specbatch rollout settle` promotes it. Outputs do not change.
    """
    scope = DeployScope(tenant.strip(), job.strip(), tag.strip())
    shares = shares_in(steps)
    _check(action, what, scope, reason, steps, history, json)
    with closing(make_store(load_settings())) as store:
        if action is Action.LIST:
            _list(store, history, json)
        elif action is Action.SHOW:
            _show(store, what or "", json)
        elif action is Action.START:
            model = find(store, what or "")
            # Its drafts would be off, and a model that never drafts can look better than one does.
            check_fits(store, model, must_pay=True)
            begun = store.begin_rollout(model.fingerprint, scope, shares, reason.strip())
            say(f"rollout {begun.number}: {model.label} for {scope.words}, {begun.state}")
        elif action is Action.STOP:
            ended = _stop(store, scope, what, reason.strip())
            say(f"rollout {ended.number} is stopped: its candidate drafts no more")
        else:
            _settle(store)


def shares_in(steps: str) -> tuple[float, ...]:
    """Of `0,1,25,100`. Raises `UsageError`."""
    try:
        return shares_of([float(step) for step in steps.split(",")])
    except ValueError:
        raise UsageError(
            f"--steps {steps!r} must be rising percentages, one of them between 0 and 100, that "
            f"end with 100, such as {DEFAULT_PERCENTS}"
        ) from None


def _check(
    action: Action,
    what: str | None,
    scope: DeployScope,
    reason: str,
    steps: str,
    history: bool,
    json: bool,
) -> None:
    """Refuse what an action would ignore."""
    command = f"`specbatch rollout {action}`"
    if action is Action.START and not what:
        raise UsageError(f"{command} needs a model: see `specbatch models list`")
    if action is Action.SHOW and not what:
        raise UsageError(f"{command} needs a number: see `specbatch rollout list --history`")
    if what and action not in (Action.START, Action.SHOW, Action.STOP):
        raise UsageError(f"{command} takes no model: leave out {what!r}")
    if what and action is Action.STOP and scope != DeployScope():
        raise UsageError(f"{command} takes a number, or --tenant, --job and --tag: not both")
    if action in _SCOPED and not reason.strip():
        raise UsageError(f"{command} needs --reason, which is kept in the history")
    if action not in _SCOPED and (reason or scope != DeployScope()):
        raise UsageError(f"{command} takes no {given(scope, reason)}")
    if action is not Action.START and steps != DEFAULT_PERCENTS:
        raise UsageError(f"{command} takes no --steps; start does")
    if history and action is not Action.LIST:
        raise UsageError(f"{command} takes no --history; list does")
    if json and action not in _PRINTED:
        raise UsageError(f"{command} has no --json; list and show have")


def _stop(store: Store, scope: DeployScope, number: str | None, reason: str) -> Rollout:
    """By number or scope. Raises `UsageError`, which names those in progress."""
    live = store.rollouts()
    found = [one for one in live if (str(one.number) == number if number else one.scope == scope)]
    if not found:
        which = f"{number!r} in progress" if number else f"in progress for {scope.words}"
        there = "; ".join(f"{one.number} for {one.scope.words}" for one in live) or "none"
        raise UsageError(f"there is no rollout {which}; in progress: {there}")
    return store.stop_rollout(found[0].scope, reason)


def _settle(store: Store) -> None:
    settled = store.settle_rollouts()
    for one in settled:
        say(f"rollout {one.number} for {one.scope.words}: {one.state}")
    if not settled:
        say("no candidate waits to be promoted")


def _list(store: Store, history: bool, json: bool) -> None:
    found = store.rollouts(history)
    if json:
        say_json([asdict(one) for one in found])
        return
    if not found:
        say("no rollouts: start one with `specbatch rollout start MODEL --reason WHY`")
        return
    labels = _labels(store)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("rollout", "candidate", "for", "begun", "state"):
        table.add_column(heading, overflow="fold")
    for one in found:
        label = labels.get(one.fingerprint, shown(one.fingerprint))
        begun = moment(one.started_at)
        table.add_row(str(one.number), label, one.scope.words, begun, one.state)
    show_whole(table)


def _show(store: Store, number: str, json: bool) -> None:
    found = [one for one in store.rollouts(history=True) if str(one.number) == number]
    if not found:
        raise UsageError(f"no rollout {number!r}: see `specbatch rollout list --history`")
    (one,) = found
    groups = store.rollout_groups(one.number)
    if json:
        figures = {
            name: {side: _as_json(ratio) for side, ratio in sides.items()}
            for name, sides in figures_of(groups).items()
        }
        say_json({**asdict(one), "groups": len(groups), "figures": figures})
        return
    labels = _labels(store)
    candidate = labels.get(one.fingerprint, shown(one.fingerprint))
    say(f"rollout {one.number}: {candidate} for {one.scope.words}, {one.state}")
    say(f"  begun {moment(one.started_at)} by {one.started_by}: {one.reason}")
    if one.ended_at is not None:
        why = f": {one.end_reason}" if one.end_reason else ""
        say(f"  ended {moment(one.ended_at)} by {one.ended_by}{why}")
    drawn = sum(seen.is_candidate for seen in groups)
    say(f"  {len(groups):,} groups, {drawn:,} with the candidate")
    say(f"  bets: that it is better grown {one.better:,.1f}-fold, worse {one.worse:,.1f}-fold")
    for name, sides in figures_of(groups).items():
        for side, ratio in sides.items():
            if not math.isnan(ratio.value):
                say(f"  {name}, {side}: {ratio.words}")


def _as_json(ratio: Interval) -> dict[str, float | None]:
    """JSON has no infinity."""
    return {name: value if math.isfinite(value) else None for name, value in asdict(ratio).items()}


def _labels(store: Store) -> Mapping[str, str]:
    return {model.fingerprint: model.label for model in store.models()}
