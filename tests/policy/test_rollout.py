"""Rollouts of draft models: how often a verdict is wrong, how soon a difference is found."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from specbatch.pipeline.policy.rollout import (
    MOST_GROUPS,
    SHADOW_GROUPS,
    Course,
    course_of,
    is_drawn,
)
from specbatch.schemas.rollouts import DEFAULT_STEPS, Observed, Outcome

CANARY = DEFAULT_STEPS[1:]


def simulated(
    seed: int, effect: float, steps: tuple[float, ...] = CANARY, most: int = MOST_GROUPS
) -> tuple[Outcome | None, list[Observed]]:
    """Groups of jobs that differ, until the verdict. The candidate earns `effect` times as much."""
    rng = random.Random(seed)
    course, groups, job = Course(steps), list[Observed](), 1.0
    while course.outcome is None and len(groups) < most:
        if len(groups) % 40 == 0:
            job = rng.lognormvariate(0.0, 0.3)
        is_candidate = rng.random() < course.share
        earned = job * rng.lognormvariate(0.0, 0.25) * (effect if is_candidate else 1.0)
        seen = Observed(course.share, is_candidate, round(10_000 * earned), 1.0, shadow_drafts=1)
        groups.append(seen)
        course.add(groups[-1])
    return course.outcome, groups


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


def test_a_course_is_the_same_whenever_it_is_looked_at() -> None:
    end, groups = simulated(3, 1.4, DEFAULT_STEPS)
    course = course_of(DEFAULT_STEPS, groups)
    assert (course.outcome, course.share) == (end, 1.0)
    course.add(groups[0])  # a group that was on its way when the verdict fell
    assert course.outcome is end


def test_no_group_is_drafted_for_before_some_were_watched_in_shadow() -> None:
    watched = Observed(0.0, False, 100, 1.0, 10, 20, 20)
    course = course_of(DEFAULT_STEPS, [watched] * (SHADOW_GROUPS - 1))
    assert course.share == 0.0
    course.add(watched)
    assert (course.share, course.outcome) == (0.01, None)


def test_a_candidate_whose_shadow_drafts_are_worse_never_drafts() -> None:
    course = course_of(DEFAULT_STEPS, [Observed(0.0, False, 100, 1.0, 10, 3, 20)] * SHADOW_GROUPS)
    assert (course.share, course.outcome) == (0.0, Outcome.WORSE)


def test_better_shadow_drafts_alone_are_no_reason_to_promote() -> None:
    course = course_of((0.0, 0.5, 1.0), [Observed(0.0, False, 100, 1.0, 10, 20, 3)] * 400)
    assert (course.share, course.outcome) == (0.5, None)


def test_groups_in_which_nothing_was_compared_do_not_count() -> None:
    course = course_of((0.0, 0.5, 1.0), [Observed(0.0, False, 100, 1.0)] * 400)
    assert (course.share, course.outcome) == (0.0, None)


def test_groups_without_a_price_are_ranked_by_what_was_accepted() -> None:
    assert [Observed(0.5, True, n, 0.0).earned for n in (0, 7)] == [0.0, 7.0]


def test_chance_draws_the_share_of_groups_and_the_same_ones_again() -> None:
    drawn = [is_drawn(7, "job", i, 0.25) for i in range(4000)]
    assert 900 <= sum(drawn) <= 1100
    assert drawn == [is_drawn(7, "job", i, 0.25) for i in range(4000)]
    other = [is_drawn(8, "job", i, 0.25) for i in range(4000)]
    assert sum(a and b for a, b in zip(drawn, other, strict=True)) < 350
    assert not any(is_drawn(7, "job", i, 0.0) for i in range(100))
    assert all(is_drawn(7, "job", i, 1.0) for i in range(100))
