"""`specbatch drafting on|off|list`: what drafts, while jobs run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import moment, remark, say, say_json
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.engines.models.draft_names import kind_of
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.draft_switches import DraftSwitch, SwitchScope
from specbatch.schemas.errors import UsageError
from specbatch.schemas.records import JobRow
from specbatch.schemas.speculation_spec import SOURCES

_MOST_JOBS = 200  # among which a scope should have one


class Turn(StrEnum):
    """What to do with drafting."""

    OFF = "off"
    ON = "on"
    LIST = "list"


def drafting(
    turn: Annotated[Turn, typer.Argument(metavar="off|on|list", help="what to do")],
    tenant: Annotated[
        str, typer.Option("--tenant", help="only this tenant's jobs", show_default=False)
    ] = "",
    job: Annotated[
        str, typer.Option("--job", help="only jobs of this name", show_default=False)
    ] = "",
    tag: Annotated[
        str, typer.Option("--tag", help="only rows with this tag", show_default=False)
    ] = "",
    proposer: Annotated[
        str,
        typer.Option(
            "--proposer",
            help="only drafts of grammar, block, history, ngram, draft-model or draft-model@NAME",
            show_default=False,
        ),
    ] = "",
    reason: Annotated[
        str,
        typer.Option("--reason", help="with off: why; the history keeps it", show_default=False),
    ] = "",
    history: Annotated[
        bool, typer.Option("--history", help="with list: also what is on again")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="with list: one JSON array on one line")
    ] = False,
) -> None:
    """Switch drafting off while jobs run, for everything or a part; switch it on again; list both.

    Workers follow within a heartbeat, a third of SPECBATCH_LEASE_SEC. Outputs do not change. `on`
    ends the switch with exactly these options.
    """
    scope = SwitchScope(tenant.strip(), job.strip(), tag.strip(), proposer.strip())
    _check(turn, scope, reason, lists=history or json)
    with closing(make_store(load_settings())) as store:
        if turn is Turn.LIST:
            _list(store.draft_switches(history), json)
        elif turn is Turn.OFF:
            _off(store, scope, reason.strip())
        else:
            _on(store, scope)


def _check(turn: Turn, scope: SwitchScope, reason: str, lists: bool) -> None:
    if turn is Turn.OFF and not reason.strip():
        raise UsageError("`specbatch drafting off` needs --reason, which is kept in the history")
    if turn is not Turn.OFF and reason:
        raise UsageError(f"--reason is for `specbatch drafting off`: leave it out of `{turn}`")
    if turn is not Turn.LIST and lists:
        raise UsageError("--history and --json are for `specbatch drafting list`: leave them out")
    if scope.proposer and kind_of(scope.proposer) not in SOURCES:
        raise UsageError(
            f"no proposer is called {scope.proposer!r}: there are {', '.join(SOURCES)} and "
            "draft-model@NAME"
        )
    if turn is Turn.LIST and scope != SwitchScope():
        raise UsageError("`specbatch drafting list` lists all switches: leave the scope out")


def _off(store: Store, scope: SwitchScope, reason: str) -> None:
    switch, is_new = store.switch_drafting_off(scope, reason)
    if is_new:
        say(f"drafting is off for {scope}: workers stop drafting within a heartbeat")
        if not any(_concerns(scope, job) for job in store.list_jobs(_MOST_JOBS)):
            remark(f"none of the newest {_MOST_JOBS} jobs fits {scope}: check the spelling")
    else:
        say(f"already off: {switch_line(switch)}")


def _concerns(scope: SwitchScope, job: JobRow) -> bool:
    return scope.concerns(job.tenant, job.name)


def _on(store: Store, scope: SwitchScope) -> None:
    if store.switch_drafting_on(scope) is None:
        raise UsageError(
            f"drafting was not switched off for {scope}: `specbatch drafting list` shows what is "
            "off; give the same options"
        )
    say(f"drafting may continue for {scope}: workers follow within a heartbeat")
    others = [switch for switch in store.draft_switches() if _meet(switch.scope, scope)]
    for switch in others:
        say(f"still off: {switch_line(switch)}")


def _meet(one: SwitchScope, other: SwitchScope) -> bool:
    """Whether both cover something in common."""
    pairs = zip(asdict(one).values(), asdict(other).values(), strict=True)
    return all(a == b or not (a and b) for a, b in pairs)


def _list(switches: Sequence[DraftSwitch], json: bool) -> None:
    if json:
        say_json([asdict(switch) for switch in switches])
        return
    for switch in switches:
        say(switch_line(switch))
    if not switches:
        say("drafting is switched off for nothing")


def switch_line(switch: DraftSwitch) -> str:
    """What is off, since when, by whom, why, and until when."""
    ended = (
        "" if switch.on_at is None else f"; on again at {moment(switch.on_at)} by {switch.on_by}"
    )
    return (
        f"{switch.scope}, off since {moment(switch.off_at)} by {switch.off_by}: "
        f"{switch.reason}{ended}"
    )
