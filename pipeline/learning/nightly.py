"""What a night teaches, without anybody asked: train, try, and roll out what is better.

    settle    promote what last night's groups found better
    train     from what the store keeps, beginning with the model that is deployed
    try       the new model beside the verifier, on prompts that it has not learned from
    roll out  shadow drafts, then a growing share of groups; the groups themselves decide

Each part is on disk or in the store when it is done, so a run that is killed resumes there.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.learning.gate import Pair, try_pair
from specbatch.pipeline.learning.registry import register, unchanged
from specbatch.pipeline.learning.wiring import Watcher, train
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import UsageError
from specbatch.schemas.registry import DeployScope, ModelVersion, PairTrial, deployed_for
from specbatch.schemas.rollouts import DEFAULT_STEPS, Rollout
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import EngineSpec
from specbatch.schemas.training import DataOrder, Parameters

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lesson:
    """What to learn for whom."""

    name: str  # of the model in the registry
    verifier: str  # folder or hub id
    folder: Path  # for the trained models, a folder each
    tenant: str = "default"
    job: str = ""  # name of the jobs to learn from and to draft for; empty: all of the tenant's
    steps: tuple[float, ...] = DEFAULT_STEPS
    held_out: float = 0.2  # share of the prompts to judge by
    parameters: Parameters = field(default_factory=Parameters)

    @property
    def scope(self) -> DeployScope:
        """What was learned from a tenant's texts drafts for nobody else."""
        return DeployScope(self.tenant, self.job)

    def folder_name(self, night: str) -> str:
        """Different for each lesson, as one process may load the models of several."""
        tenant = "" if self.tenant == "default" else self.tenant
        parts = [part for part in (self.name, tenant, self.job, night) if part]
        return re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(parts))

    @property
    def data(self) -> DataOrder:
        jobs = (self.job,) if self.job else ()
        return DataOrder(self.tenant, jobs, held_out=self.held_out)


@dataclass(frozen=True, slots=True)
class Learned:
    """How far a night came. A part that is None was not reached."""

    said: str
    candidate: ModelVersion | None = None
    record: dict[str, Any] | None = None  # of the training
    trial: PairTrial | None = None
    rollout: Rollout | None = None


def learn(
    settings: Settings,
    store: Store,
    lesson: Lesson,
    night: str,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Learned:
    """`night` names the folder of this run's model: a run that is repeated resumes its training.

    Raises `UsageError` where no model of the name is deployed, or there is nothing to learn from.
    """
    for one in store.settle_rollouts():
        log.info("rollout %d has ended: %s", one.number, one.outcome)
    goes_on = next((one for one in store.rollouts() if one.scope == lesson.scope), None)
    parent = _parent(store, lesson, goes_on)
    out = lesson.folder / lesson.folder_name(night)
    watcher = Watcher(log.info, lambda *_: None, lambda *_: None, is_stopped)
    record = train(settings, store, parent, out, lesson.data, lesson.parameters, watcher)
    gained = record["held_out"]["accepted_length"]["difference"]
    figures = f"{gained['value']:+.3f} ({gained['low']:+.3f} to {gained['high']:+.3f})"
    gain = f"accepted tokens per pass {figures}"
    if not record["better"]:
        said = f"not surely better than its parent: {gain}"
        if goes_on is not None:
            groups = len(store.rollout_groups(goes_on.number))
            said += f"; rollout {goes_on.number} goes on after {groups:,} groups"
            if not groups:
                said += ": restart workers, so that they load its candidate"
        return Learned(said, record=record, rollout=goes_on)
    folder = inspect_model(str(out))
    candidate, _ = register(store, lesson.name, folder)
    if candidate.retired_at is not None:
        return Learned(f"{candidate.label} is retired", candidate, record)
    for one in store.rollouts(history=True):
        if (one.fingerprint, one.scope) == (candidate.fingerprint, lesson.scope):
            return Learned(f"{candidate.label} was in rollout {one.number}: {one.outcome}")
    trial = _tried(settings, store, lesson, folder, is_stopped)
    if not trial.pays:
        store.retire(candidate.fingerprint)  # its name must not lead to it
        said = f"{candidate.label} is better than its parent ({gain}), but {trial.reason}"
        return Learned(said, candidate, record, trial)
    if goes_on is not None and goes_on.fingerprint != candidate.fingerprint:
        store.stop_rollout(lesson.scope, f"{candidate.label} is better still")
    reason = f"trained on {night}: {gain}"
    rollout = store.begin_rollout(candidate.fingerprint, lesson.scope, lesson.steps, reason)
    said = f"{candidate.label} begins rollout {rollout.number}: {gain}; {trial.reason}"
    return Learned(said, candidate, record, trial, rollout)


def _parent(store: Store, lesson: Lesson, goes_on: Rollout | None) -> str:
    """Where the model is to begin with: the candidate of a rollout that goes on, else what is
    deployed. Small gains add up, night by night, until groups can tell."""
    models = {model.fingerprint: model for model in store.models()}
    scope = lesson.scope
    deployed = deployed_for(store.deployments(), scope.tenant, scope.job_name)
    present = models.get(deployed.get(None, ""))
    if present is None or present.name != lesson.name:
        raise UsageError(
            f"no version of {lesson.name} is deployed for {scope.words}: begin with "
            f"`specbatch models add {lesson.name} FOLDER` and `specbatch models promote "
            f"{lesson.name}`"
        )
    return unchanged(present if goes_on is None else models[goes_on.fingerprint])


def _tried(
    settings: Settings,
    store: Store,
    lesson: Lesson,
    folder: ModelFolder,
    is_stopped: Callable[[], bool],
) -> PairTrial:
    def on_turn(_done: int, _turns: int) -> None:
        if is_stopped():
            raise KeyboardInterrupt

    pair = Pair(inspect_model(lesson.verifier), folder, EngineSpec())
    return try_pair(settings, store, pair, lesson.data, on_turn)
