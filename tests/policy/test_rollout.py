"""Rollouts of draft models: how often a verdict is wrong, how soon a difference is found."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from specbatch.pipeline.policy.rollout import (
    CANARY_GROUPS,
    ERROR,
    MOST_GROUPS,
    MOST_SHADOW_GROUPS,
    SHADOW_GROUPS,
    STAKES,
    RolloutState,
    accepted_in_shadow,
    accepted_share,
    is_drawn,
    state_of,
    tokens_per_cost,
)
from specbatch.schemas.rollouts import DEFAULT_STEPS, Observed, Outcome

CANARY = DEFAULT_STEPS[1:]


def simulated(
    seed: int, effect: float, steps: tuple[float, ...] = CANARY, most: int = MOST_GROUPS
) -> tuple[Outcome | None, list[Observed]]:
    """Groups of jobs that differ, until the verdict. The candidate earns `effect` times as much."""
    rng = random.Random(seed)
    state, groups, job = RolloutState(steps), list[Observed](), 1.0
    while state.outcome is None and len(groups) < most:
        if len(groups) % 40 == 0:
            job = rng.lognormvariate(0.0, 0.3)
        is_candidate = rng.random() < state.share
        earned = job * rng.lognormvariate(0.0, 0.25) * (effect if is_candidate else 1.0)
        seen = Observed(state.share, is_candidate, round(10_000 * earned), 1.0, shadow_drafts=1)
        groups.append(seen)
        state.add(groups[-1])
    return state.outcome, groups


@pytest.mark.parametrize("steps", [CANARY, (0.25, 1.0), (0.5, 1.0)])
def test_of_two_hundred_models_that_are_the_same_at_most_one_in_twenty_is_judged(
    steps: tuple[float, ...],
) -> None:
    ends = Counter(simulated(seed, 1.0, steps)[0] for seed in range(200))
    judged = ends[Outcome.BETTER] + ends[Outcome.WORSE]
    assert judged <= 10, ends
    assert ends[Outcome.UNDECIDED] == 200 - judged


@pytest.mark.parametrize(
    ("effect", "outcome"), [(1.25, Outcome.BETTER), (0.8, Outcome.WORSE), (0.3, Outcome.WORSE)]
)
def test_a_difference_is_found(effect: float, outcome: Outcome) -> None:
    found = [simulated(seed, effect) for seed in range(20)]
    assert sum(end is outcome for end, _ in found) >= 19
    assert {end for end, _ in found} <= {outcome, Outcome.UNDECIDED}


def test_useless_drafts_are_stopped_while_few_groups_have_them() -> None:
    drafted = []
    for seed in range(20):
        end, groups = simulated(seed, 0.0)
        assert end is Outcome.WORSE
        drafted.append(sum(seen.is_candidate for seen in groups) / len(groups))
    assert max(drafted) < 0.1


def test_a_rollouts_state_is_the_same_whenever_it_is_looked_at() -> None:
    end, groups = simulated(3, 1.4, DEFAULT_STEPS)
    state = state_of(DEFAULT_STEPS, groups)
    assert (state.outcome, state.share) == (end, 1.0)
    state.add(groups[0])  # a group that was on its way when the verdict fell
    assert state.outcome is end


def test_no_group_is_drafted_for_before_some_were_watched_in_shadow() -> None:
    seen = Observed(0.0, False, 100, 1.0, 50, 10, 20, 20)
    state = state_of(DEFAULT_STEPS, [seen] * (SHADOW_GROUPS - 1))
    assert state.share == 0.0
    state.add(seen)
    assert (state.share, state.outcome) == (0.01, None)


@pytest.mark.parametrize(("candidate", "serving"), [(3, 20), (20, 3)])
def test_shadow_drafts_end_nothing_as_they_do_not_say_what_a_model_costs(
    candidate: int, serving: int
) -> None:
    seen = Observed(0.0, False, 100, 1.0, 50, 10, candidate, serving)
    state = state_of((0.0, 0.5, 1.0), [seen] * 400)
    assert (state.share, state.outcome, state.better, state.worse) == (0.5, None, 1.0, 1.0)


def watched(seed: int, effect: float, same_cost: bool = True) -> RolloutState:
    """The state after so many groups in shadow that each accepted 40 tokens or so."""
    rng = random.Random(seed)
    state = RolloutState(DEFAULT_STEPS, same_cost)
    while state.outcome is None and state.step == 0:
        hard = rng.lognormvariate(0.0, 0.5)  # for both
        accepted = [round(40 * hard * rng.lognormvariate(0.0, 0.15) * e) for e in (effect, 1.0)]
        state.add(Observed(0.0, False, 100, 1.0, 50, 16, *accepted))
    return state


def test_shadow_drafts_of_models_that_cost_the_same_are_judged_and_rarely_wrongly() -> None:
    ends = Counter(watched(seed, 1.0).outcome for seed in range(200))
    assert ends[Outcome.BETTER] + ends[Outcome.WORSE] <= 10, ends
    assert watched(0, 1.0).step == 1, "then it drafts for some groups, as others do"


@pytest.mark.parametrize(("effect", "outcome"), [(1.07, Outcome.BETTER), (0.93, Outcome.WORSE)])
def test_a_small_difference_shows_in_shadow(effect: float, outcome: Outcome) -> None:
    found = [watched(seed, effect) for seed in range(40)]
    assert sum(state.outcome is outcome for state in found) >= 38
    assert not any(watched(seed, effect, same_cost=False).outcome for seed in range(5))


def test_a_rollout_goes_on_where_nothing_can_be_compared() -> None:
    without = Observed(0.0, False, 100, 1.0)
    state = state_of((0.0, 0.5, 1.0), [without] * (MOST_SHADOW_GROUPS - 1))
    assert state.share == 0.0
    state.add(without)
    assert (state.share, state.outcome) == (0.5, None)


def test_no_share_lasts_for_ever() -> None:
    never_drawn = [Observed(0.01, False, 100, 1.0)] * MOST_GROUPS
    assert state_of(CANARY, never_drawn).outcome is Outcome.UNDECIDED


def test_a_candidate_with_more_accepted_tokens_that_costs_more_is_worse() -> None:
    """Accepted tokens per cost would have it the other way round."""
    rng, state = random.Random(5), RolloutState((0.5, 1.0))
    groups = []
    for _ in range(400):
        mine = rng.random() < 0.5
        noise = rng.lognormvariate(0.0, 0.1)
        groups.append(Observed(0.5, mine, 100, (1.3 if mine else 1.0) * noise, 80 if mine else 45))
        state.add(groups[-1])
    assert state.outcome is Outcome.WORSE
    dear, present = (tokens_per_cost(groups, of_candidate) for of_candidate in (True, False))
    assert dear.high < present.low


def test_chance_draws_the_share_of_groups_and_the_same_ones_again() -> None:
    drawn = [is_drawn(7, "job", i, 0.25) for i in range(4000)]
    assert 900 <= sum(drawn) <= 1100
    assert drawn == [is_drawn(7, "job", i, 0.25) for i in range(4000)]
    other = [is_drawn(8, "job", i, 0.25) for i in range(4000)]
    assert sum(a and b for a, b in zip(drawn, other, strict=True)) < 350
    assert not any(is_drawn(7, "job", i, 0.0) for i in range(100))
    assert all(is_drawn(7, "job", i, 1.0) for i in range(100))


# --- bets ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("is_candidate", [True, False])
def test_a_bet_is_fair_whatever_the_share_and_wins_by_the_rank(
    share: float, is_candidate: bool
) -> None:
    """Of a candidate that is just as good, the bet is worth nothing on average."""
    state = RolloutState((share, 1.0))
    for tokens in (100, 100, 200, 300):
        state.add(Observed(share, not is_candidate, tokens, 1.0))
    better, worse = state._better._of_stakes[:], state._worse._of_stakes[:]
    state.add(Observed(share, is_candidate, 200, 1.0))
    standing = (2 - 1) / 4  # it earned more than two of the four, and less than one
    drawn = 1.0 - share if is_candidate else -share
    won = standing * drawn / max(share, 1.0 - share)
    assert state.better == pytest.approx(
        sum(a * (1.0 + stake * won) for a, stake in zip(better, STAKES, strict=True))
    )
    assert state.worse == pytest.approx(
        sum(a * (1.0 - stake * won) for a, stake in zip(worse, STAKES, strict=True))
    )


def test_the_first_group_stands_nowhere() -> None:
    state = state_of((0.5, 1.0), [Observed(0.5, True, 100, 1.0)])
    assert (state.better, state.worse) == (pytest.approx(1.0), pytest.approx(1.0))


@pytest.mark.parametrize("effect", [1.6, 0.6])
def test_a_verdict_falls_as_soon_as_a_gambler_has_enough(effect: float) -> None:
    end, groups = simulated(1, effect, (0.5, 1.0))
    before = state_of((0.5, 1.0), groups[:-1])
    after = state_of((0.5, 1.0), groups)
    assert max(before.better, before.worse) < 1.0 / ERROR <= max(after.better, after.worse)
    assert after.outcome is end is (Outcome.BETTER if effect > 1.0 else Outcome.WORSE)
    assert after.share == (1.0 if effect > 1.0 else 0.5)


def test_a_share_grows_by_groups_that_the_candidate_drafted_for_and_each_counts_anew() -> None:
    """All of them alike, so that nobody wins a bet."""
    state = RolloutState((0.1, 0.2, 0.4, 1.0))
    for share, following in ((0.1, 0.2), (0.2, 0.4)):
        for _ in range(10):
            state.add(Observed(share, False, 100, 1.0, shadow_drafts=5))
            state.add(Observed(share / 2, True, 100, 1.0))  # it began at an earlier share
        for _ in range(CANARY_GROUPS):
            assert state.share == share
            state.add(Observed(share, True, 100, 1.0))
        assert state.share == following
    for _ in range(CANARY_GROUPS):
        state.add(Observed(0.4, True, 100, 1.0))
    assert (state.share, state.outcome) == (0.4, None), "all groups take a verdict"


def test_a_rollout_without_a_verdict_ends_at_its_last_group() -> None:
    state = state_of(CANARY, [Observed(0.01, False, 100, 1.0)] * (MOST_GROUPS - 1))
    assert state.outcome is None
    state.add(Observed(0.01, False, 100, 1.0))
    assert state.outcome is Outcome.UNDECIDED


def test_figures_are_of_the_groups_in_which_chance_chose() -> None:
    groups = [
        Observed(0.0, False, 1000, 1.0, 900, 10, 30, 20),
        Observed(0.5, True, 100, 2.0, 60, 5, 4, 3),
        Observed(0.5, True, 300, 2.0, 80),
        Observed(0.5, False, 100, 1.0, 30),
    ]
    assert tokens_per_cost(groups, of_candidate=True).value == pytest.approx(400 / 4.0)
    assert tokens_per_cost(groups, of_candidate=False).value == pytest.approx(100.0)
    assert accepted_share(groups, of_candidate=True).value == pytest.approx(140 / 400)
    assert accepted_share(groups, of_candidate=False).value == pytest.approx(30 / 100)
    assert accepted_in_shadow(groups, of_candidate=True).value == pytest.approx(34 / 15)
    assert accepted_in_shadow(groups, of_candidate=False).value == pytest.approx(23 / 15)
