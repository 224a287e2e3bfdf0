"""Rollouts: how a candidate goes on from share to share, ends, and takes the place of a model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from contracts.shorthand import successes, together

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.policy.rollout import CANARY_GROUPS, SHADOW_GROUPS
from specbatch.schemas.errors import UsageError
from specbatch.schemas.registry import CONFIG_DIGEST, DeployScope, NewModel
from specbatch.schemas.rollouts import Observed, Outcome, Rollout

ALL, NEWS = DeployScope(), DeployScope(tag="news")
HALF = (0.5, 1.0)
BAD, GOOD = 10, 1000  # tokens of a group


@pytest.fixture
def candidate(store: Store) -> str:
    """Registered beside a model that drafts for everything."""
    for fingerprint in ("aa", "bb"):
        store.add_model(NewModel(fingerprint, "docs", f"/models/{fingerprint}"))
    store.promote("aa", ALL, "the first")
    return "bb"


def observe(store: Store, rollout: Rollout, groups: int, candidate: int, present: int) -> Rollout:
    """Groups in turns: tokens of the candidate's, and of those of the present model."""
    for i in range(groups):
        mine = i % 2 == 0
        seen = Observed(rollout.share, mine, candidate if mine else present, 1.0)
        rollout = store.observe_rollout(rollout.number, "job", i, seen)
    return rollout


def test_a_better_candidate_drafts_for_all_and_is_promoted(store: Store, candidate: str) -> None:
    begun = store.begin_rollout(candidate, ALL, HALF, "trained last night")
    assert (begun.share, begun.outcome, begun.reason) == (0.5, None, "trained last night")
    assert store.settle_rollouts() == []
    decided = observe(store, begun, 60, GOOD, BAD)
    assert (decided.outcome, decided.share, decided.ended_at) == (Outcome.BETTER, 1.0, None)
    assert store.rollouts() == [decided]
    (settled,) = store.settle_rollouts()
    assert (settled.outcome, settled.ended_at is not None) == (Outcome.BETTER, True)
    (present,) = store.deployments()
    assert (present.fingerprint, present.scope) == (candidate, ALL)
    assert present.reason.startswith("rollout 1: better, the bet on it has grown")
    assert store.rollouts() == []
    assert store.rollouts(history=True) == [settled]
    assert store.settle_rollouts() == []


@pytest.mark.parametrize(
    ("configs", "outcome"),
    [(("f00", "f00"), Outcome.BETTER), (("f00", "f01"), None), ((None, None), None)],
    ids=["same config", "another config", "not recorded"],
)
def test_shadow_drafts_decide_between_models_that_differ_by_their_weights_alone(
    store: Store, configs: tuple[str | None, str | None], outcome: Outcome | None
) -> None:
    for fingerprint, config in zip(("aa", "bb"), configs, strict=True):
        origin = {} if config is None else {CONFIG_DIGEST: config}
        store.add_model(NewModel(fingerprint, "docs", f"/{fingerprint}", origin=origin))
    store.promote("aa", ALL, "the first")
    rollout = store.begin_rollout("bb", ALL, (0.0, 0.5, 1.0), "trained last night")
    for i in range(SHADOW_GROUPS):
        seen = Observed(0.0, False, 100, 1.0, 50, 10, 30, 20)
        rollout = store.observe_rollout(rollout.number, "job", i, seen)
    assert rollout.outcome is outcome


def test_a_worse_candidate_ends_at_once_and_nothing_is_promoted(
    store: Store, candidate: str
) -> None:
    begun = store.begin_rollout(candidate, ALL, HALF, "trained last night")
    ended = observe(store, begun, 60, BAD, GOOD)
    assert (ended.outcome, ended.ended_at is not None) == (Outcome.WORSE, True)
    assert ended.worse >= 50
    assert store.rollouts() == store.settle_rollouts() == []
    assert [one.fingerprint for one in store.deployments()] == ["aa"]


def test_shares_grow_after_enough_groups(store: Store, candidate: str) -> None:
    rollout = store.begin_rollout(candidate, ALL, (0.0, 0.1, 0.3, 1.0), "trained last night")
    shares = []
    for i in range(SHADOW_GROUPS + 2 * CANARY_GROUPS):
        seen = Observed(rollout.share, rollout.share > 0, GOOD, 1.0, shadow_drafts=3)
        rollout = store.observe_rollout(rollout.number, "job", i, seen)
        shares.append(rollout.share)
    grown = [0.0] * (SHADOW_GROUPS - 1) + [0.1] * CANARY_GROUPS + [0.3] * (CANARY_GROUPS + 1)
    assert shares == grown


def test_a_group_counts_once_however_often_it_is_told(store: Store, candidate: str) -> None:
    begun = store.begin_rollout(candidate, ALL, HALF, "trained last night")
    telling = partial(store.observe_rollout, begun.number, "job")
    successes(
        together(*(partial(telling, i % 3, Observed(0.5, True, i % 3, 2.0)) for i in range(12)))
    )
    groups = store.rollout_groups(begun.number)
    assert sorted(one.tokens for one in groups) == [0, 1, 2]


def test_a_rollout_needs_a_model_to_compare_with_and_a_scope_of_its_own(
    store: Store, candidate: str
) -> None:
    store.begin_rollout(candidate, NEWS, HALF, "news first")
    with pytest.raises(UsageError, match="a rollout for tag news already"):
        store.begin_rollout(candidate, NEWS, HALF, "again")
    with pytest.raises(UsageError, match="docs:1 drafts for everything already"):
        store.begin_rollout("aa", ALL, HALF, "the same")
    with pytest.raises(UsageError, match="docs:2 is in a rollout"):
        store.retire(candidate)
    store.roll_back(ALL, "bad")
    with pytest.raises(UsageError, match="nothing to compare docs:2 with"):
        store.begin_rollout(candidate, DeployScope("acme"), HALF, "acme first")


def test_stopping_promoting_and_rolling_back_end_a_rollout(store: Store, candidate: str) -> None:
    with pytest.raises(UsageError, match="no rollout for everything"):
        store.stop_rollout(ALL, "none")
    store.add_model(NewModel("cc", "docs", "/models/cc"))
    ends = (
        ("too slow", lambda: store.stop_rollout(ALL, "too slow")),
        ("promoted: by hand", lambda: store.promote("cc", ALL, "by hand")),
        ("rolled back: bad", lambda: store.roll_back(ALL, "bad")),
    )
    for reason, end in ends:
        begun = store.begin_rollout(candidate, ALL, HALF, "trained last night")
        end()
        ended = store.rollouts(history=True)[-1]
        assert (ended.outcome, ended.end_reason) == (Outcome.STOPPED, reason)
        assert store.observe_rollout(begun.number, "job", 0, Observed(0.5, True, 1, 1.0)) == ended


def test_a_better_candidate_that_is_stopped_is_not_promoted(store: Store, candidate: str) -> None:
    begun = store.begin_rollout(candidate, ALL, HALF, "trained last night")
    decided = observe(store, begun, 60, GOOD, BAD)
    stopped = store.stop_rollout(ALL, "somebody found a fault")
    assert stopped == replace(
        decided,
        outcome=Outcome.STOPPED,
        end_reason="somebody found a fault",
        ended_at=stopped.ended_at,
        ended_by=stopped.ended_by,
    )
    assert store.settle_rollouts() == []


def test_a_rollout_ends_once_another_model_drafts_for_a_wider_scope(
    store: Store, candidate: str
) -> None:
    store.begin_rollout(candidate, NEWS, HALF, "news first")
    store.promote("aa", NEWS, "the same as before")
    assert len(store.rollouts()) == 1
    store.roll_back(NEWS, "not needed")
    assert len(store.rollouts()) == 1, "what drafts is the same"
    store.promote(candidate, ALL, "for all")
    assert store.rollouts() == []
    assert store.rollouts(history=True)[0].end_reason == "promoted: for all"


def test_a_candidate_that_was_worse_is_retired(store: Store, candidate: str) -> None:
    begun = store.begin_rollout(candidate, ALL, HALF, "trained last night")
    observe(store, begun, 60, BAD, GOOD)
    assert store.settle_rollouts() == []
    assert [one.label for one in store.models() if one.retired_at is not None] == ["docs:2"]


def test_what_the_promotion_of_another_candidate_stopped_is_not_promoted(
    store: Store, candidate: str
) -> None:
    """The first one is for everything, so the second was compared with what drafts no more."""
    store.add_model(NewModel("cc", "docs", "/models/cc"))
    for fingerprint, scope in ((candidate, ALL), ("cc", NEWS)):
        begun = store.begin_rollout(fingerprint, scope, HALF, "trained last night")
        observe(store, begun, 60, GOOD, BAD)
    (settled,) = store.settle_rollouts()
    assert settled.fingerprint == candidate
    assert [one.fingerprint for one in store.deployments()] == [candidate]
    first, second = store.rollouts(history=True)
    assert (first.outcome, second.outcome) == (Outcome.BETTER, Outcome.STOPPED)


@pytest.mark.usefixtures("candidate")
def test_many_settle_at_once(store: Store) -> None:
    """Every local job does before it starts, so none may fail of what others have done."""
    for i in range(6):
        store.add_model(NewModel(f"w{i}", "docs", f"/models/w{i}"))
        begun = store.begin_rollout(f"w{i}", NEWS, HALF, "trained last night")
        observe(store, begun, 60, BAD, GOOD)
    assert not any(successes(together(*(store.settle_rollouts for _ in range(6)))))
    retired = [one.fingerprint for one in store.models() if one.retired_at is not None]
    assert retired == [f"w{i}" for i in range(6)]
