"""Trains, tries and rolls out a draft model.

    settle    promote what last night's groups found better
    train     from what the store keeps, beginning with the model that is deployed
    try       the new model beside the verifier, on held-out prompts
    roll out  shadow drafts, then a growing share of groups; the groups themselves decide

Each part is on disk or in the store when it is done, so a run that is killed resumes there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.models.model_folder import check_pair, inspect_model
from specbatch.pipeline.learning.checkpoints import LOCK, about_of, locked, record_of
from specbatch.pipeline.learning.gate import Pair, try_pair
from specbatch.pipeline.learning.registry import register, unchanged
from specbatch.pipeline.learning.training import Watcher, verdict_of
from specbatch.pipeline.learning.wiring import train
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import UsageError
from specbatch.schemas.registry import DeployScope, ModelVersion, PairTrial, deployed_for
from specbatch.schemas.rollouts import DEFAULT_STEPS, Rollout
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import EngineSpec
from specbatch.schemas.training import DataOrder, Parameters

log = logging.getLogger(__name__)

_DATA = DataOrder()


@dataclass(frozen=True, slots=True)
class LearnOrder:
    """What to learn for whom."""

    name: str  # of the model in the registry
    verifier: str  # folder or hub id
    folder: Path  # for the trained models, a folder each
    tenant: str = _DATA.tenant
    job: str = ""  # name of the jobs to learn from and to draft for; empty: all of the tenant's
    steps: tuple[float, ...] = DEFAULT_STEPS
    held_out: float = _DATA.held_out  # share of the prompts to judge by
    parameters: Parameters = field(default_factory=Parameters)

    @property
    def scope(self) -> DeployScope:
        """What was learned from a tenant's texts drafts for nobody else."""
        return DeployScope(self.tenant, self.job)

    def folder_name(self, night: str) -> str:
        """Different for each order, as one process may load the models of several."""
        whose = json.dumps([self.name, self.tenant, self.job])
        digest = hashlib.sha256(whose.encode()).hexdigest()[:6]
        parts = [part for part in (self.name, self.job, night, digest) if part]
        return re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(parts))

    def data_of(self, verifier: str) -> DataOrder:
        """What a verifier wrote, by its fingerprint."""
        jobs = (self.job,) if self.job else ()
        return DataOrder(self.tenant, jobs, held_out=self.held_out, verifier=verifier)


@dataclass(frozen=True, slots=True)
class Learned:
    """How far a night came. A part that is None was not reached."""

    summary: str
    candidate: ModelVersion | None = None
    record: dict[str, Any] | None = None  # of the training
    trial: PairTrial | None = None
    rollout: Rollout | None = None


def learn(
    settings: Settings,
    store: Store,
    order: LearnOrder,
    night: str,
    is_stopped: Callable[[], bool] = lambda: False,
    watcher: Watcher = Watcher(log.info),
) -> Learned:
    """`night` names the folder of this run's model: a run that is repeated resumes, and one that
    had ended says what became of it.

    Raises `UsageError` where no model of the name is deployed, or there is nothing to learn from.
    """
    out = order.folder / order.folder_name(night)
    with locked(out / f"{LOCK}-night", "another --night"):
        return _learn(settings, store, order, night, out, is_stopped, watcher)


def _learn(
    settings: Settings,
    store: Store,
    order: LearnOrder,
    night: str,
    out: Path,
    is_stopped: Callable[[], bool],
    watcher: Watcher,
) -> Learned:
    _settle(store)
    verifier = inspect_model(order.verifier)
    data = order.data_of(verifier.fingerprint.digest)
    record = record_of(out)
    if record is None:
        parent = _parent(store, order, out)
        check_pair(verifier, inspect_model(parent))  # before hours of training
        watching = replace(watcher, is_stopped=is_stopped)
        record = train(settings, store, parent, out, data, order.parameters, watching)
    if not record["better"]:
        return _not_better(store, order, record)
    folder = inspect_model(str(out))
    candidate, _ = register(store, order.name, folder)
    known = _known(store, order, candidate)
    if known is not None:
        return replace(known, record=record)

    def on_turn(_done: int, _turns: int) -> None:
        if is_stopped():
            raise KeyboardInterrupt

    pair = Pair(verifier, folder, EngineSpec())
    replaces = _replaces_worse(store, candidate, record["parent"]["digest"], verifier)
    try:
        trial = try_pair(settings, store, pair, data, on_turn, replaces)
    except UsageError as error:
        again = f"`specbatch learn` with --night {shlex.quote(night)} tries it again"
        raise UsageError(
            f"{candidate.label} is trained, but cannot be tried: {error}; then {again}"
        ) from None
    return _decided(store, order, night, candidate, record, trial)


def _settle(store: Store) -> None:
    for one in store.settle_rollouts():
        log.info("rollout %d has ended: %s", one.number, one.state)


def _now(store: Store, order: LearnOrder) -> Rollout | None:
    """The rollout of the order's scope that continues."""
    return _of_scope(store.rollouts(), order)


def _of_scope(rollouts: Iterable[Rollout], order: LearnOrder) -> Rollout | None:
    return next((one for one in rollouts if one.scope == order.scope), None)


def _parent(store: Store, order: LearnOrder, out: Path) -> str:
    """Where the model is to begin with: that of a training that is resumed, else the candidate of
    a rollout in progress, else what is deployed. Small gains add up, night by night, until groups
    can tell."""
    models = {model.fingerprint: model for model in store.models()}
    scope = order.scope
    begun, goes_on = about_of(out), _now(store, order)
    if begun is not None and begun["parent"] in models:
        return unchanged(models[begun["parent"]])
    deployed = deployed_for(store.deployments(), scope.tenant, scope.job_name)
    present = models.get(deployed.get(None, ""))
    if present is None or present.name != order.name:
        here = "" if present is None else f", where {present.label} drafts"
        raise UsageError(
            f"no version of {order.name} is deployed for {scope.words}{here}: begin with "
            f"`specbatch models add {order.name} FOLDER` and `specbatch models promote "
            f"{order.name} {_options(scope if present else DeployScope())}--reason WHY`"
        )
    return unchanged(present if goes_on is None else models[goes_on.fingerprint])


def _options(scope: DeployScope) -> str:
    named = {"--tenant": scope.tenant, "--job": scope.job_name}
    return "".join(f"{option} {shlex.quote(value)} " for option, value in named.items() if value)


def _gain(record: dict[str, Any]) -> str:
    gained = record["held_out"]["accepted_length"]["difference"]
    figures = f"{gained['value']:+.3f} ({gained['low']:+.3f} to {gained['high']:+.3f})"
    return f"accepted tokens per pass {figures}"


def _not_better(store: Store, order: LearnOrder, record: dict[str, Any]) -> Learned:
    verdict = verdict_of(record)
    summary = f"{verdict} than its parent: {_gain(record)}"
    goes_on = _now(store, order)
    if goes_on is not None:
        groups = len(store.rollout_groups(goes_on.number))
        summary += f"; rollout {goes_on.number} continues after {groups:,} groups"
        if not groups:
            summary += ": restart workers, so that they load its candidate"
    return Learned(summary, record=record, rollout=goes_on)


def _known(store: Store, order: LearnOrder, candidate: ModelVersion) -> Learned | None:
    """What became of a candidate on an earlier run; None: it is new, or its run was killed."""
    mine = [one for one in store.rollouts(history=True) if one.fingerprint == candidate.fingerprint]
    if (rollout := _of_scope(reversed(mine), order)) is not None:
        summary = f"{candidate.label} had rollout {rollout.number}: {rollout.state}"
        return Learned(summary, candidate, rollout=rollout)
    if candidate.retired_at is not None:
        return Learned(f"{candidate.label} is retired", candidate)
    return None


def _replaces_worse(
    store: Store, candidate: ModelVersion, parent: str, verifier: ModelFolder
) -> bool:
    """Whether the parent, which the training found worse, drafts at the candidate's cost. It does
    not beside a verifier where a trial has switched it off."""
    of = verifier.fingerprint.digest, parent
    trials = [one for one in store.pair_trials() if (one.verifier, one.proposer) == of]
    costs_alike = any(m.fingerprint == parent and m.costs_like(candidate) for m in store.models())
    return costs_alike and all(one.pays for one in trials)


def _decided(
    store: Store,
    order: LearnOrder,
    night: str,
    candidate: ModelVersion,
    record: dict[str, Any],
    trial: PairTrial,
) -> Learned:
    """Begin the candidate's rollout, if it pays.

    What is in progress is read again: jobs ran during the hours of training and of the trial.
    """
    label, gain = candidate.label, _gain(record)
    if not trial.pays:
        store.retire(candidate.fingerprint)  # its name must not lead to it
        summary = f"{label} is better than its parent ({gain}), but {trial.reason}"
        return Learned(summary, candidate, record, trial)
    _settle(store)
    goes_on = _now(store, order)
    if goes_on is not None and goes_on.fingerprint != record["parent"]["digest"]:
        other = f"rollout {goes_on.number} continues, of another model than its parent"
        return Learned(f"{label} is not rolled out: {other}", candidate, record, trial)
    if goes_on is not None:
        with suppress(UsageError):  # it has ended since
            store.stop_rollout(order.scope, f"{label} is better still")
    reason = f"trained on {night}: {gain}"
    rollout = store.begin_rollout(candidate.fingerprint, order.scope, order.steps, reason)
    summary = f"{label} begins rollout {rollout.number}: {gain}; {trial.reason}"
    return Learned(summary, candidate, record, trial, rollout)
