"""`specbatch models …`: registered draft models, and which of them drafts for whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from specbatch.jobs.cli.audit import FOUND
from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import moment, progress_bar, remark, say, say_json, show_whole
from specbatch.jobs.cli.options import ForJob, ForTag, ForTenant
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.learning.registry import find, register
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import UsageError
from specbatch.schemas.extras import require_engine_extra
from specbatch.schemas.fingerprint import shown
from specbatch.schemas.registry import Deployment, DeployScope, ModelVersion, PairTrial
from specbatch.schemas.spec import EngineSpec
from specbatch.schemas.training import DataOrder
from specbatch.schemas.uris import model_ref


class Action(StrEnum):
    """What to do."""

    LIST = "list"
    ADD = "add"
    SHOW = "show"
    PROMOTE = "promote"
    ROLLBACK = "rollback"
    RETIRE = "retire"
    TRY = "try"


_NAMED = (Action.ADD, Action.SHOW, Action.PROMOTE, Action.RETIRE, Action.TRY)
_SCOPED = (Action.PROMOTE, Action.ROLLBACK)
_PRINTED = (Action.LIST, Action.SHOW, Action.TRY)


def models(
    action: Annotated[
        Action,
        typer.Argument(metavar="list|add|show|try|promote|rollback|retire", help="what to do"),
    ] = Action.LIST,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="with add: a name; else NAME, NAME:VERSION or a fingerprint",
            show_default=False,
        ),
    ] = None,
    files: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILES]", help="with add: its folder or hub id", show_default=False
        ),
    ] = None,
    tenant: ForTenant = "",
    job: ForJob = "",
    tag: ForTag = "",
    verifier: Annotated[
        str | None,
        typer.Option(
            "--verifier",
            help="with try: the model whose drafts it is to write: folder or hub id",
            show_default=False,
        ),
    ] = None,
    reason: Annotated[
        str,
        typer.Option(
            "--reason",
            help="with promote and rollback: why; the history keeps it",
            show_default=False,
        ),
    ] = "",
    json: Annotated[
        bool, typer.Option("--json", help="with list, show and try: one JSON value on one line")
    ] = False,
) -> None:
    """Register draft models, promote one for all or some rows, roll back, retire; list and show.

    The narrowest promotion counts for a row. A worker started with `--proposer models:NAME` loads
    what is promoted. Outputs do not change. `try` runs recent prompts of a tenant, or of one job,
    with and without drafts; a draft model that cannot pay beside a verifier is not asked there any
    more, and the exit code is 3.
    """
    scope = DeployScope(tenant.strip(), job.strip(), tag.strip())
    _check(action, model, files, scope, reason, verifier, json)
    with closing(make_store(load_settings())) as store:
        if action is Action.LIST:
            _list(store, json)
        elif action is Action.ADD:
            _add(store, model or "", files or "")
        elif action is Action.SHOW:
            _show(store, find(store, model or ""), json)
        elif action is Action.PROMOTE:
            _promote(store, find(store, model or ""), scope, reason.strip())
        elif action is Action.ROLLBACK:
            _roll_back(store, scope, reason.strip())
        elif action is Action.TRY:
            _try(store, find(store, model or ""), verifier or "", scope, json)
        else:
            retired = store.retire(_exactly(store, model or "").fingerprint)
            say(f"{retired.label} is retired: it cannot be promoted any more")


def _check(
    action: Action,
    model: str | None,
    files: str | None,
    scope: DeployScope,
    reason: str,
    verifier: str | None,
    json: bool,
) -> None:
    """Refuse what an action would ignore."""
    command = f"`specbatch models {action}`"
    if action is Action.ADD and not (model and files):
        raise UsageError(f"{command} needs a name, and the model's folder or hub id after it")
    if action in _NAMED and not model:
        raise UsageError(f"{command} needs a model: see `specbatch models list`")
    if action not in _NAMED and model:
        raise UsageError(f"{command} takes no model: leave out {model!r}")
    if files and action is not Action.ADD:
        raise UsageError(f"{command} takes one model: leave out {files!r}")
    if action in _SCOPED and not reason.strip():
        raise UsageError(f"{command} needs --reason, which is kept in the history")
    if action is Action.TRY:
        if not verifier:
            raise UsageError(f"{command} needs --verifier, the model whose drafts it is to write")
        if reason or scope.tag:
            raise UsageError(f"{command} takes no --tag and --reason")
    elif action not in _SCOPED and (reason or scope != DeployScope()):
        raise UsageError(f"{command} takes no {given(scope, reason)}")
    if verifier and action is not Action.TRY:
        raise UsageError(f"{command} takes no --verifier; try does")
    if json and action not in _PRINTED:
        raise UsageError(f"{command} has no --json; list, show and try have")


def given(scope: DeployScope, reason: str) -> str:
    """The options that were given, as in `--job and --reason`."""
    values = {
        "--tenant": scope.tenant,
        "--job": scope.job_name,
        "--tag": scope.tag,
        "--reason": reason,
    }
    return " and ".join(name for name, value in values.items() if value)


def check_fits(store: Store, version: ModelVersion, must_pay: bool = False) -> None:
    """Warn where a trial found that its drafts cannot pay. Raises `UsageError` where its tokens are
    not the verifier's, and no trial beside another one found that they are; with `must_pay` also
    where no trial found that its drafts pay."""
    trials = [one for one in store.pair_trials() if one.proposer == version.fingerprint]
    unfit = [one for one in trials if not one.numeric_class]
    if unfit and len(unfit) == len(trials):
        raise UsageError(f"{version.label} was tried and does not fit: {unfit[-1].reason}")
    if must_pay and trials and not any(one.pays for one in trials):
        raise UsageError(f"{version.label} was tried and cannot pay: {trials[-1].reason}")
    for one in trials:
        if not one.pays:
            remark(f"beside verifier {shown(one.verifier)}, {version.label}: {one.reason}")


def _add(store: Store, name: str, files: str) -> None:
    require_engine_extra()
    from specbatch.pipeline.engines.models.model_folder import inspect_model

    version, is_new = register(store, name, inspect_model(model_ref(files, Path.cwd())))
    state = "is registered" if is_new else "has these files already"
    say(f"{version.label} {state}: fingerprint {shown(version.fingerprint)}, files {version.ref}")


def _try(
    store: Store, version: ModelVersion, verifier: str, scope: DeployScope, json: bool
) -> None:
    require_engine_extra()
    from specbatch.pipeline.engines.models.model_folder import inspect_model
    from specbatch.pipeline.learning.gate import Pair, try_pair

    settings = load_settings()
    pair = Pair(
        inspect_model(model_ref(verifier, Path.cwd())), inspect_model(version.ref), EngineSpec()
    )
    order = DataOrder(scope.tenant or "default", (scope.job_name,) if scope.job_name else ())
    with progress_bar("trying") as update:
        trial = try_pair(
            settings, store, pair, order, lambda done, of: update(completed=done, total=of)
        )
    if json:
        say_json(asdict(trial))
    else:
        for line in trial_lines(version.label, trial):
            say(line)
    if not trial.pays:
        raise typer.Exit(FOUND)


def trial_lines(label: str, trial: PairTrial) -> Iterator[str]:
    """The figures and the verdict, a line each."""
    for one in trial.figures["measured"]:
        yield (
            f"{one['sequences']:>4} at once, depth {one['depth']}: acceptance "
            f"{one['acceptance']:.2f}, {one['accepted_length']:.2f} drafted tokens kept in a pass, "
            f"{one['ratio']:.2f} of the speed of depth 0 ({one['lowest']:.2f} to "
            f"{one['highest']:.2f})"
        )
    if trial.figures["memory_bytes"]:
        yield f"memory of both models: {trial.figures['memory_bytes'] >> 20:,} MiB"
    yield f"{label}: {trial.reason}"


def _exactly(store: Store, wanted: str) -> ModelVersion:
    """No newest version: the same command twice would retire two."""
    version = find(store, wanted)
    if wanted == version.name:
        raise UsageError(f"say which version: `specbatch models retire {version.label}`")
    return version


def _promote(store: Store, version: ModelVersion, scope: DeployScope, reason: str) -> None:
    check_fits(store, version)
    store.promote(version.fingerprint, scope, reason)
    say(f"{version.label} drafts for {scope.words}, from the next groups on, where it is loaded")
    if version.origin.get("better") is False:
        remark("its training did not show that it is better than its parent")


def _roll_back(store: Store, scope: DeployScope, reason: str) -> None:
    begun = store.roll_back(scope, reason)
    if begun is None:
        say(f"no model drafts for {scope.words} any more, as none did before; wider scopes count")
    else:
        say(f"{find(store, begun.fingerprint).label} drafts for {scope.words} again")


def _list(store: Store, json: bool) -> None:
    models = store.models()
    live = store.deployments()
    if json:
        say_json([_as_json(m, [d for d in live if d.fingerprint == m.fingerprint]) for m in models])
    elif not models:
        say("no models: add one with `specbatch models add NAME FOLDER`")
    else:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("model", "fingerprint", "parent", "added", "drafts for"):
            table.add_column(heading, overflow="fold")
        labels = {m.fingerprint: m.label for m in models}
        for m in models:
            scopes = [d.scope.words for d in live if d.fingerprint == m.fingerprint]
            state = "retired" if m.retired_at is not None else "; ".join(scopes) or "-"
            parent = _called(m.parent, labels) if m.parent else "-"
            table.add_row(m.label, shown(m.fingerprint), parent, moment(m.added_at), state)
        show_whole(table)


def _show(store: Store, version: ModelVersion, json: bool) -> None:
    history = [d for d in store.deployments(history=True) if d.fingerprint == version.fingerprint]
    if json:
        say_json(_as_json(version, history))
        return
    labels = {m.fingerprint: m.label for m in store.models()}
    say(f"{version.label}  fingerprint {version.fingerprint}")
    say(f"  files   {version.ref}")
    if version.parent:
        say(f"  parent  {_called(version.parent, labels)}")
    say(f"  added   {moment(version.added_at)} by {version.added_by}")
    if version.retired_at is not None:
        say(f"  retired {moment(version.retired_at)} by {version.retired_by}")
    for trial in (t for t in store.pair_trials() if t.proposer == version.fingerprint):
        beside = f"beside verifier {shown(trial.verifier)} on {moment(trial.tried_at)}"
        say(f"  tried   {beside}: {trial.reason}")
    for one in history:
        begun = f"from {moment(one.started_at)} by {one.started_by}: {one.reason}"
        say(f"  drafts for {one.scope.words} {begun}")
        if one.ended_at is not None:
            why = f": {one.end_reason}" if one.end_reason else ""
            say(f"    until {moment(one.ended_at)} by {one.ended_by}{why}")


def _called(fingerprint: str, labels: Mapping[str, str]) -> str:
    return labels.get(fingerprint, shown(fingerprint))


def _as_json(version: ModelVersion, deployments: Sequence[Deployment]) -> dict[str, object]:
    return {**asdict(version), "deployments": [asdict(one) for one in deployments]}
