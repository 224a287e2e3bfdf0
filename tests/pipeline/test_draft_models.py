"""Which draft models a group's rows have: by deployments, and by chance those of rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ledger.builders import Clock, completion, new_job

from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.stages.draft_models import (
    DEPLOYED_SEC,
    NO_GROUP_MODELS,
    DraftModels,
    GroupModels,
)
from specbatch.schemas.errors import StoreError
from specbatch.schemas.fingerprint import Fingerprint
from specbatch.schemas.provenance import TICKS_PER_SEC, Ticks
from specbatch.schemas.records import JobRow, Lease, Stage, Verification
from specbatch.schemas.registry import Deployment, DeployScope, NewModel
from specbatch.schemas.rollouts import Observed, Outcome
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.speculation import NO_SHADOW_PAIR, ShadowPair
from support.databases import new_database

BOTH = ("aa", "bb")
SPEC = JobSpec.model_validate(
    {"input": {"uri": "in.jsonl"}, "output": {"uri": "out"}, "verifier": "v", "proposer": "d"}
)
NEWS = DeployScope(tag="news")
FOLDER = ModelFolder("d", Path("d"), "llama", 300, 64, Fingerprint("aa", {}))


class MayBeAway(SqlStore):
    """A store that can be away."""

    away = False

    def deployments(self, history: bool = False) -> list[Deployment]:
        if self.away:
            raise StoreError("away")
        return super().deployments(history)


@pytest.fixture
def store() -> Iterator[MayBeAway]:
    store = MayBeAway(new_database(), clock=Clock())
    for fingerprint in BOTH:
        store.add_model(NewModel(fingerprint, "docs", f"/models/{fingerprint}"))
    store.promote("aa", DeployScope(), "first")
    yield store
    store.close()


@pytest.fixture
def job(store: MayBeAway) -> JobRow:
    return store.create_job(new_job())[0]


def lease(job: JobRow, index: int) -> Lease:
    return Lease(job.job_id, index, Stage.VERIFY, 1, "w", 1)


def of(store: MayBeAway, job: JobRow, index: int = 0, spec: JobSpec | None = None) -> GroupModels:
    return DraftModels(store).of_group(job, spec or SPEC, index, BOTH)


def test_deployments_are_read_now_and_then_and_kept_while_the_store_is_away(
    store: MayBeAway, job: JobRow
) -> None:
    now, spec = [0.0], SPEC
    models = DraftModels(store, clock=lambda: now[0])
    assert models.of_group(job, spec, 0, BOTH).drafting == {None: "aa"}
    store.promote("bb", DeployScope(), "second")
    assert models.of_group(job, spec, 0, BOTH).drafting == {None: "aa"}
    now[0] += DEPLOYED_SEC
    assert models.of_group(job, spec, 0, BOTH).drafting == {None: "bb"}
    store.away = True
    now[0] += DEPLOYED_SEC
    assert models.of_group(job, spec, 0, BOTH).drafting == {None: "bb"}


def test_jobs_whose_outputs_depend_on_the_draft_model_take_no_part(
    store: MayBeAway, job: JobRow
) -> None:
    spec = SPEC
    ratio = {"verification": Verification.REJECTION}
    pinned = spec.model_copy(update={"speculation": spec.speculation.model_copy(update=ratio)})
    assert of(store, job, spec=pinned) == NO_GROUP_MODELS
    assert DraftModels(store).of_group(job, spec, 0, ()) == NO_GROUP_MODELS, "none is loaded"


def test_chance_gives_groups_the_candidate_and_only_the_rows_of_its_scope(
    store: MayBeAway, job: JobRow
) -> None:
    store.begin_rollout("bb", NEWS, (0.5, 1.0), "trained")
    groups = [of(store, job, index) for index in range(40)]
    drawn = [group for group in groups if group.trials[0].drawn]
    assert 10 <= len(drawn) <= 30
    for group in groups:
        (trial,) = group.trials
        assert group.drafting == ({None: "aa", "news": "bb"} if trial.drawn else {None: "aa"})
        assert (trial.concerns("news"), trial.concerns(None)) == (True, False)
        assert not group.in_shadow


def test_at_no_share_the_candidate_drafts_in_shadow(store: MayBeAway, job: JobRow) -> None:
    store.begin_rollout("bb", NEWS, (0.0, 0.5, 1.0), "trained")
    group = of(store, job)
    assert (group.drafting, group.in_shadow) == ({None: "aa"}, {"news": "bb"})


def test_rows_with_a_narrower_deployment_are_not_the_rollouts(
    store: MayBeAway, job: JobRow
) -> None:
    store.promote("aa", NEWS, "news need aa")
    store.begin_rollout("bb", DeployScope(), (0.5, 1.0), "trained")
    (trial,) = of(store, job).trials
    assert (trial.concerns(None), trial.concerns("x"), trial.concerns("news")) == (
        *(True, True),
        False,
    )


@pytest.mark.parametrize("loaded", [("aa",), ("bb",)])
def test_a_worker_without_both_models_takes_no_part(
    store: MayBeAway, job: JobRow, loaded: tuple[str, ...]
) -> None:
    store.begin_rollout("bb", DeployScope(), (0.5, 1.0), "trained")
    group = DraftModels(store).of_group(job, SPEC, 0, loaded)
    assert (group.trials, group.drafting) == ((), {None: "aa"})


def test_a_group_counts_by_the_rows_that_the_rollout_concerns(
    store: MayBeAway, job: JobRow
) -> None:
    rollout = store.begin_rollout("bb", NEWS, (0.5, 1.0), "trained")
    models = DraftModels(store)
    trials = models.of_group(job, SPEC, 0, BOTH).trials
    ticks = Ticks(verify=TICKS_PER_SEC // 2)
    news = replace(completion(0), tag="news", accepted=2, cost_usd=0.5, ticks=ticks)
    other = replace(completion(1), tag=None, accepted=3, cost_usd=9.0)
    models.observe(lease(job, 0), trials, [(other, NO_SHADOW_PAIR)])
    assert store.rollout_groups(rollout.number) == []
    models.observe(lease(job, 1), trials, [(news, ShadowPair(2, 3, 4)), (other, NO_SHADOW_PAIR)])
    (seen,) = store.rollout_groups(rollout.number)
    assert seen == Observed(0.5, trials[0].drawn, 3, 0.5, 2, 2, 3, 4)


def test_cost_is_device_time_whether_a_worker_has_a_price_or_none(
    store: MayBeAway, job: JobRow
) -> None:
    rollout = store.begin_rollout("bb", DeployScope(), (0.5, 1.0), "trained")
    models = DraftModels(store)
    for index, usd in enumerate((0.0, 2.0)):
        trials = models.of_group(job, SPEC, index, BOTH).trials
        record = replace(completion(0), cost_usd=usd, ticks=Ticks(verify=3 * TICKS_PER_SEC))
        models.observe(lease(job, index), trials, [(record, NO_SHADOW_PAIR)])
    assert [seen.cost for seen in store.rollout_groups(rollout.number)] == [3.0, 3.0]


def test_a_group_that_took_no_time_says_nothing(store: MayBeAway, job: JobRow) -> None:
    rollout = store.begin_rollout("bb", DeployScope(), (0.5, 1.0), "trained")
    models = DraftModels(store)
    trials = models.of_group(job, SPEC, 0, BOTH).trials
    models.observe(lease(job, 0), trials, [(replace(completion(0), ticks=Ticks()), NO_SHADOW_PAIR)])
    assert store.rollout_groups(rollout.number) == []


def test_a_rollout_that_ends_counts_no_more_for_the_next_group(
    store: MayBeAway, job: JobRow
) -> None:
    rollout = store.begin_rollout("bb", DeployScope(), (0.5, 1.0), "trained")
    models, spec = DraftModels(store), SPEC
    for index in range(200):
        group = models.of_group(job, spec, index, BOTH)
        if not group.trials:
            break
        (trial,) = group.trials
        ticks = Ticks(verify=TICKS_PER_SEC * (9 if trial.drawn else 1))
        record = replace(completion(0), ticks=ticks)
        models.observe(lease(job, index), group.trials, [(record, NO_SHADOW_PAIR)])
    assert not models.of_group(job, spec, 999, BOTH).trials
    (ended,) = store.rollouts(history=True)
    assert (ended.number, ended.outcome) == (rollout.number, Outcome.WORSE)


def test_jobs_without_draft_models_and_routed_rows_take_no_part(
    store: MayBeAway, job: JobRow
) -> None:
    store.begin_rollout("bb", DeployScope(), (0.5, 1.0), "trained")

    def asking(**speculation: object) -> JobSpec:
        return SPEC.model_copy(
            update={"speculation": SPEC.speculation.model_copy(update=speculation)}
        )

    assert of(store, job, spec=asking(sources=("ngram",))) == NO_GROUP_MODELS
    (trial,) = of(store, job, spec=asking(routes=(("news", "none"),))).trials
    assert (trial.concerns("news"), trial.concerns(None)) == (False, True)


def test_rows_that_nothing_is_deployed_for_are_not_the_candidates(
    store: MayBeAway, job: JobRow
) -> None:
    store.promote("aa", NEWS, "news alone")
    store.roll_back(DeployScope(), "only news")
    models = DraftModels(store)
    assert models.of_group(job, SPEC, 0, BOTH, FOLDER).drafting == {"news": "aa"}
    store.begin_rollout("bb", NEWS, (0.0, 0.5, 1.0), "trained")
    group = DraftModels(store).of_group(job, SPEC, 0, BOTH, FOLDER)
    assert group.drafting == {"news": "aa", None: "aa"}
