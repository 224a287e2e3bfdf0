"""Depths: as good as trying every combination, and 0 where drafting does not pay."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from specbatch.pipeline.policy.depth import Candidate, DepthDecision, StepCost, choose_depths

CHEAP_ROWS = StepCost(5e-3, 2e-5, 5e-4, 2e-6)
DEAR_ROWS = StepCost(1e-5, 1e-3, 5e-4, 2e-6)


def block(acceptance: float, limit: int = 8) -> Candidate:
    return Candidate(limit, acceptance, needs_draft_model=False)


def model(acceptance: float, limit: int = 8) -> Candidate:
    return Candidate(limit, acceptance, needs_draft_model=True)


def tokens_and_seconds(
    candidates: Sequence[Candidate], depths: Sequence[int], cost: StepCost
) -> tuple[float, float]:
    """The objective, straight from its definition."""
    tokens = seconds = 0.0
    passes = 0
    for candidate, depth in zip(candidates, depths, strict=True):
        tokens += sum(candidate.acceptance**j for j in range(depth + 1))
        seconds += (1 + depth) * cost.verify_row_sec
        if candidate.needs_draft_model:
            passes = max(passes, depth)
            seconds += depth * cost.draft_row_sec
    return tokens, seconds + cost.verify_base_sec + passes * cost.draft_base_sec


def best_by_trying(candidates: Sequence[Candidate], cost: StepCost, max_draft_tokens: int) -> float:
    rates = []
    for depths in itertools.product(*(range(c.limit + 1) for c in candidates)):
        if sum(depths) <= max_draft_tokens:
            tokens, seconds = tokens_and_seconds(candidates, depths, cost)
            rates.append(tokens / seconds)
    return max(rates)


def assert_consistent(
    decision: DepthDecision, candidates: Sequence[Candidate], cost: StepCost, most: int
) -> None:
    assert len(decision.depths) == len(candidates)
    assert all(0 <= d <= c.limit for d, c in zip(decision.depths, candidates, strict=True))
    assert sum(decision.depths) <= most
    tokens, seconds = tokens_and_seconds(candidates, decision.depths, cost)
    assert decision.expected_tokens == pytest.approx(tokens, rel=1e-6)
    # Passes that turned out unused may be counted, never too few.
    assert decision.expected_sec >= seconds * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_depths_are_within_two_percent_of_the_best_of_all(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(5):
        candidates = [
            Candidate(
                limit=generator.randint(0, 5),
                acceptance=generator.choice([0.0, 0.1, 0.4, 0.7, 0.9, 0.99]),
                needs_draft_model=generator.random() < 0.5,
            )
            for _ in range(generator.randint(1, 4))
        ]
        cost = StepCost(*(10 ** generator.uniform(-6, -2) for _ in range(4)))
        most = generator.choice([0, 1, 3, 100])
        decision = choose_depths(candidates, cost, most)
        assert_consistent(decision, candidates, cost, most)
        tokens, seconds = tokens_and_seconds(candidates, decision.depths, cost)
        assert tokens / seconds >= 0.98 * best_by_trying(candidates, cost, most)


def test_cheap_rows_and_good_drafts_are_taken_whole() -> None:
    decision = choose_depths([block(0.95)] * 4, CHEAP_ROWS, 1024)
    assert decision.depths == (8, 8, 8, 8)
    assert (
        decision.tokens_per_sec
        > 3 * choose_depths([block(0.95, 0)] * 4, CHEAP_ROWS, 0).tokens_per_sec
    )


@pytest.mark.parametrize(
    ("candidates", "cost"),
    [
        pytest.param([block(0.6)] * 64, DEAR_ROWS, id="a saturated batch"),
        pytest.param([block(0.0)] * 4, CHEAP_ROWS, id="hopeless drafts"),
        pytest.param([model(0.02)], CHEAP_ROWS, id="a cold draft model"),
        pytest.param([model(0.9)], StepCost(1e-3, 1e-5, 5e-2, 1e-5), id="a slow draft model"),
        pytest.param([block(0.9, limit=0)], CHEAP_ROWS, id="nothing to offer"),
    ],
)
def test_depth_0_falls_out_where_drafting_does_not_pay(
    candidates: list[Candidate], cost: StepCost
) -> None:
    assert set(choose_depths(candidates, cost, 1024).depths) == {0}


def test_a_hopeless_sequence_is_left_out_among_good_ones() -> None:
    decision = choose_depths([block(0.9), block(0.001), model(0.9)], CHEAP_ROWS, 1024)
    good, hopeless, modelled = decision.depths
    assert hopeless <= 1
    assert good >= modelled > 0


def test_a_larger_batch_is_drafted_less() -> None:
    cost = StepCost(5e-3, 2e-4, 5e-4, 2e-6)
    depths = [choose_depths([block(0.7)] * n, cost, 4096).depths for n in (1, 4, 16, 64, 256)]
    shallow = [max(d) for d in depths]
    assert shallow == sorted(shallow, reverse=True)
    assert shallow[0] > shallow[-1]


@pytest.mark.parametrize("make", [block, model], ids=["block", "draft model"])
def test_depth_rises_with_acceptance(make: Callable[[float], Candidate]) -> None:
    rates = [0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99, 1.0]
    depths = [choose_depths([make(rate)], CHEAP_ROWS, 1024).depths[0] for rate in rates]
    assert depths == sorted(depths)
    assert depths[0] == 0
    assert depths[-1] == 8
    among = [choose_depths([make(r), make(0.5)], CHEAP_ROWS, 1024).depths[0] for r in rates]
    assert among == sorted(among)


@pytest.mark.parametrize("most", [0, 1, 5, 6, 17, 1024])
def test_no_more_draft_tokens_than_the_step_allows(most: int) -> None:
    candidates = [block(0.99, 6), model(0.9, 3), block(0.5, 1), block(0.8, 40)]
    decision = choose_depths(candidates, CHEAP_ROWS, most)
    assert_consistent(decision, candidates, CHEAP_ROWS, most)
    if most in (1, 5, 6):
        assert sum(decision.depths) == most


def test_scarce_tokens_go_where_they_are_worth_most() -> None:
    assert choose_depths([block(0.5), block(0.9), block(0.1)], CHEAP_ROWS, 3).depths == (0, 3, 0)


def test_nobody_to_draft_for_is_no_case_of_its_own() -> None:
    decision = choose_depths([], CHEAP_ROWS, 1024)
    assert decision.depths == ()
    assert decision.tokens_per_sec == 0


def test_costs_of_zero_are_survived() -> None:
    decision = choose_depths([block(0.5), model(0.5)], StepCost(0.0, 0.0, 0.0, 0.0), 1024)
    assert decision.tokens_per_sec > 0


def test_a_sure_draft_is_not_taken_for_certain() -> None:
    """An acceptance of 1 comes of little evidence; the estimate stays finite and below it."""
    decision = choose_depths([block(1.0, 64)], CHEAP_ROWS, 1024)
    assert 60 < decision.expected_tokens < 65
