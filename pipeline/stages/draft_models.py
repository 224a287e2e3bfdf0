"""Which draft models a group's rows have: what is deployed, and by chance the candidate of a
rollout. What the group shows then counts for the rollout."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.policy.rollout import is_drawn
from specbatch.schemas.errors import StoreError
from specbatch.schemas.provenance import TICKS_PER_SEC
from specbatch.schemas.records import CompletionRecord, JobRow, Lease, Verification
from specbatch.schemas.registry import NO_MODELS, Deployment, deployed_for
from specbatch.schemas.rollouts import Observed, Rollout
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.speculation import NO_SHADOW_PAIR, ShadowPair

log = logging.getLogger(__name__)

DEPLOYED_SEC = 10.0  # for which deployments and rollouts that were read count

Models = Mapping[str | None, str]  # fingerprints by tag; under None that of all other rows
Done = tuple[CompletionRecord, ShadowPair]


@dataclass(frozen=True, slots=True)
class Trial:
    """A group's part in a rollout."""

    rollout: Rollout
    drawn: bool  # the candidate drafts for it
    without: Models  # what drafts for whom without the rollout …
    with_it: Models  # … and if the candidate is drawn
    routed: frozenset[str | None]  # tags for which the job itself names who drafts

    def concerns(self, tag: str | None) -> bool:
        """Whether the rollout makes a difference to rows of a tag."""
        candidate = self.rollout.fingerprint
        differs = model_of(self.with_it, tag) == candidate != model_of(self.without, tag)
        return differs and tag not in self.routed

    def seen(self, done: Iterable[Done]) -> Observed | None:
        """What the group's rows showed; None: it has none that the rollout concerns, or none that
        took time here.

        Cost is device time, not money: workers of one fleet may have different prices, or none.
        """
        found = [(record, pair) for record, pair in done if self.concerns(record.tag)]
        mine = [record for record, _ in found]
        ticks = sum(record.ticks.total for record in mine)
        if not ticks:
            return None
        pairs = sum((pair for _, pair in found), NO_SHADOW_PAIR)
        return Observed(
            share=self.rollout.share,
            is_candidate=self.drawn,
            tokens=sum(len(record.token_ids) for record in mine),
            cost=ticks / TICKS_PER_SEC,
            accepted=sum(record.accepted for record in mine),
            shadow_drafts=pairs.drafts,
            shadow_candidate=pairs.candidate,
            shadow_serving=pairs.serving,
        )


@dataclass(frozen=True, slots=True)
class GroupModels:
    """Of one group."""

    drafting: Models
    in_shadow: Models  # candidates whose drafts are only compared
    trials: tuple[Trial, ...]


NO_GROUP_MODELS = GroupModels(NO_MODELS, NO_MODELS, ())


class DraftModels:
    """Reads deployments and rollouts now and then: no group waits for what hardly ever changes.

    No output depends on it: failures are logged, and the job continues.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._read_at = -math.inf
        self._deployments: Sequence[Deployment] = ()
        self._rollouts: Sequence[Rollout] = ()

    def of_group(
        self,
        job: JobRow,
        spec: JobSpec,
        group_index: int,
        loaded: Collection[str],
        main: ModelFolder | None = None,
    ) -> GroupModels:
        """`loaded`: fingerprints of the draft models that are here, `main` of these the one that
        drafts for rows which none is deployed for, while a rollout tries another one. A rollout
        counts only where candidate and present model are here.

        Where outputs depend on the draft model, it is the one that the job has pinned.
        """
        speculation = spec.speculation
        if speculation.verification is not Verification.COUPLED or not loaded:
            return NO_GROUP_MODELS
        if not (speculation.enabled and speculation.allows("draft-model")):
            return NO_GROUP_MODELS
        self._read()
        deployments = list(self._deployments)
        trials: list[Trial] = []
        shadow: dict[str | None, str] = {}
        for rollout in self._rollouts:
            trial = _trial(rollout, deployments, job, spec, group_index, loaded)
            if trial is None:
                continue
            if rollout.outcome is None:  # else its groups say nothing new
                trials.append(trial)
            if trial.drawn:
                deployments = _replaced(deployments, rollout)
            elif rollout.share <= 0.0:
                tags = {*trial.with_it, *trial.without, None}
                shadow |= {tag: rollout.fingerprint for tag in tags if trial.concerns(tag)}
        drafting = deployed_for(deployments, job.tenant, job.name)
        if main is not None and any(one.fingerprint in loaded for one in self._rollouts):
            drafting.setdefault(None, main.fingerprint.digest)
        return GroupModels(drafting, shadow, tuple(trials))

    def _read(self) -> None:
        if self._clock() - self._read_at < DEPLOYED_SEC:
            return
        try:
            deployments, rollouts = self._store.deployments(), self._store.rollouts()
            self._deployments, self._rollouts = deployments, rollouts
        except StoreError as error:
            log.warning("cannot read which models are deployed: %s", error)
        self._read_at = self._clock()

    def observe(
        self,
        lease: Lease,
        trials: Iterable[Trial],
        done: Sequence[Done],
    ) -> None:
        """Tell each rollout what a group showed. One that ends counts no more from now on."""
        for trial in trials:
            seen = trial.seen(done)
            if seen is None:
                continue
            number = trial.rollout.number
            try:
                index = lease.group_index or 0
                after = self._store.observe_rollout(number, lease.job_id, index, seen)
            except StoreError as error:
                log.warning("rollout %d misses group %s: %s", number, lease.group_index, error)
                continue
            if (after.share, after.outcome) != (trial.rollout.share, trial.rollout.outcome):
                self._read_at = -math.inf
                share = 0.0 if after.ended_at is not None else 100.0 * after.share
                message = "rollout %d: %s, the candidate drafts for %.0f %% of groups"
                log.info(message, number, after.outcome or "continues", share)


def model_of(models: Models, tag: str | None) -> str | None:
    """The fingerprint for rows of a tag."""
    return models.get(tag, models.get(None))


def _trial(
    rollout: Rollout,
    deployments: Sequence[Deployment],
    job: JobRow,
    spec: JobSpec,
    group_index: int,
    loaded: Collection[str],
) -> Trial | None:
    """None: the rollout makes no difference to the job, or cannot be followed here."""
    without = deployed_for(deployments, job.tenant, job.name)
    with_it = deployed_for(_replaced(deployments, rollout), job.tenant, job.name)
    drawn = is_drawn(rollout.number, job.job_id, group_index, rollout.share)
    routed = frozenset(tag for tag, _ in spec.speculation.routes)
    trial = Trial(rollout, drawn, without, with_it, routed)
    concerned = [tag for tag in {*with_it, *without, None} if trial.concerns(tag)]
    needed = {rollout.fingerprint, *(model_of(without, tag) for tag in concerned)}
    return trial if concerned and needed <= set(loaded) else None


def _replaced(deployments: Sequence[Deployment], rollout: Rollout) -> list[Deployment]:
    """What is deployed once the candidate is promoted."""
    others = [one for one in deployments if one.scope != rollout.scope]
    begun = rollout.started_at, rollout.started_by, rollout.reason
    return [*others, Deployment(0, rollout.fingerprint, rollout.scope, *begun)]
