"""Depths: as good as trying every combination, and 0 where drafting does not pay."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from specbatch.pipeline.policy.depth import (
    Candidate,
    DepthDecision,
    StepCost,
    break_even,
    choose_depths,
)
from specbatch.pipeline.policy.tuning import MAX_PASSES


def verifier(base: float, row: float, most: int = 1024, tile: int = 1) -> np.ndarray:
    """Seconds of a pass with 0 … most draft tokens; `tile` tokens cost as much as one."""
    return base + row * tile * np.ceil(np.arange(most + 1) / tile)


CHEAP_ROWS = StepCost(verifier(5e-3, 2e-5), 0.0, 5e-4, 2e-6)
DEAR_ROWS = StepCost(verifier(1e-5, 1e-3), 0.0, 5e-4, 2e-6)


def block(acceptance: float, limit: int = 8) -> Candidate:
    return Candidate(limit, acceptance)


def model(acceptance: float, limit: int = 8) -> Candidate:
    return Candidate(limit, acceptance, model="draft")


def tokens_and_seconds(
    candidates: Sequence[Candidate], depths: Sequence[int], cost: StepCost
) -> tuple[float, float]:
    """The objective, straight from its definition."""
    tokens = seconds = 0.0
    passes = 0
    for candidate, depth in zip(candidates, depths, strict=True):
        tokens += sum(candidate.acceptance**j for j in range(depth + 1))
        if candidate.model is not None:
            passes = max(passes, depth)
            seconds += depth * cost.draft_row_sec
    seconds += passes * cost.draft_pass_sec + (cost.draft_call_sec if passes else 0.0)
    return tokens, seconds + float(cost.verify_sec[sum(depths)])


def best_by_trying(candidates: Sequence[Candidate], cost: StepCost) -> float:
    rates = []
    for depths in itertools.product(*(range(c.limit + 1) for c in candidates)):
        if sum(depths) <= cost.most:
            tokens, seconds = tokens_and_seconds(candidates, depths, cost)
            rates.append(tokens / seconds)
    return max(rates)


def assert_consistent(
    decision: DepthDecision, candidates: Sequence[Candidate], cost: StepCost
) -> None:
    assert len(decision.depths) == len(candidates)
    assert all(0 <= d <= c.limit for d, c in zip(decision.depths, candidates, strict=True))
    assert sum(decision.depths) <= cost.most
    tokens, seconds = tokens_and_seconds(candidates, decision.depths, cost)
    assert decision.expected_tokens == pytest.approx(tokens, rel=1e-6)
    # Passes that turned out unused may be counted, never too few.
    assert decision.expected_sec >= seconds * (1 - 1e-9)


@pytest.mark.parametrize("tile", [1, 4])
@pytest.mark.parametrize("seed", range(30))
def test_depths_are_within_two_percent_of_the_best_of_all(seed: int, tile: int) -> None:
    generator = random.Random(seed)
    for _ in range(5):
        candidates = [
            Candidate(
                limit=generator.randint(0, 5),
                acceptance=generator.choice([0.0, 0.1, 0.4, 0.7, 0.9, 0.99]),
                model="draft" if generator.random() < 0.5 else None,
            )
            for _ in range(generator.randint(1, 4))
        ]
        base, row, call, pass_sec, draft_row = (10 ** generator.uniform(-6, -2) for _ in range(5))
        most = generator.choice([0, 1, 3, 100])
        cost = StepCost(verifier(base, row, most, tile), call, pass_sec, draft_row)
        decision = choose_depths(candidates, cost)
        assert_consistent(decision, candidates, cost)
        tokens, seconds = tokens_and_seconds(candidates, decision.depths, cost)
        assert tokens / seconds >= 0.98 * best_by_trying(candidates, cost)


def test_a_stepped_machine_is_filled_to_the_edge_of_a_step() -> None:
    # Eight tokens for the price of one: three sequences' eight tokens end where a step ends.
    cost = StepCost(verifier(1e-3, 4e-5, 100, tile=8))
    decision = choose_depths([block(0.6)] * 4, cost)
    assert sum(decision.depths) % 8 == 0
    assert sum(decision.depths) > 0


def test_cheap_rows_and_good_drafts_are_taken_whole() -> None:
    decision = choose_depths([block(0.95)] * 4, CHEAP_ROWS)
    assert decision.depths == (8, 8, 8, 8)
    assert (
        decision.tokens_per_sec > 3 * choose_depths([block(0.95, 0)] * 4, CHEAP_ROWS).tokens_per_sec
    )


@pytest.mark.parametrize(
    ("candidates", "cost"),
    [
        pytest.param([block(0.6)] * 64, DEAR_ROWS, id="a saturated batch"),
        pytest.param([block(0.0)] * 4, CHEAP_ROWS, id="hopeless drafts"),
        pytest.param([model(0.02)], CHEAP_ROWS, id="a cold draft model"),
        pytest.param(
            [model(0.9)],
            StepCost(verifier(1e-3, 1e-5), 0.0, 5e-2, 1e-5),
            id="a slow draft model",
        ),
        pytest.param(
            [model(0.9)],
            StepCost(verifier(1e-3, 1e-5), 5e-2, 0.0, 0.0),
            id="a draft model that is slow to ask",
        ),
        pytest.param([block(0.9, limit=0)], CHEAP_ROWS, id="nothing to offer"),
    ],
)
def test_depth_0_falls_out_where_drafting_does_not_pay(
    candidates: list[Candidate], cost: StepCost
) -> None:
    assert set(choose_depths(candidates, cost).depths) == {0}


def test_a_hopeless_sequence_is_left_out_among_good_ones() -> None:
    decision = choose_depths([block(0.9), block(0.001), model(0.9)], CHEAP_ROWS)
    good, hopeless, modelled = decision.depths
    assert hopeless <= 1
    assert good >= modelled > 0


def test_others_in_the_step_make_drafting_less_worth() -> None:
    cost = StepCost(verifier(1e-3, 1e-4))
    alone = choose_depths([block(0.7)], cost)
    among = choose_depths([block(0.7)], cost, others=60)
    assert alone.depths > among.depths


def test_a_larger_batch_is_drafted_less() -> None:
    depths = []
    for n in (1, 4, 16, 64, 256):
        cost = StepCost(verifier(5e-3 + 2e-4 * n, 2e-4, 4096), 0.0, 5e-4, 2e-6)
        depths.append(max(choose_depths([block(0.7)] * n, cost).depths))
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[-1]


@pytest.mark.parametrize("make", [block, model], ids=["block", "draft model"])
def test_depth_rises_with_acceptance(make: Callable[[float], Candidate]) -> None:
    rates = [0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99, 1.0]
    depths = [choose_depths([make(rate)], CHEAP_ROWS).depths[0] for rate in rates]
    assert depths == sorted(depths)
    assert depths[0] == 0
    assert depths[-1] == 8
    among = [choose_depths([make(r), make(0.5)], CHEAP_ROWS).depths[0] for r in rates]
    assert among == sorted(among)


@pytest.mark.parametrize("most", [0, 1, 5, 6, 17, 1024])
def test_no_more_draft_tokens_than_the_step_allows(most: int) -> None:
    candidates = [block(0.99, 6), model(0.9, 3), block(0.5, 1), block(0.8, 40)]
    cost = StepCost(verifier(5e-3, 2e-5, most), 0.0, 5e-4, 2e-6)
    decision = choose_depths(candidates, cost)
    assert_consistent(decision, candidates, cost)
    if most in (1, 5, 6):
        assert sum(decision.depths) == most


def test_scarce_tokens_go_where_they_are_worth_most() -> None:
    cost = StepCost(verifier(5e-3, 2e-5, 3))
    assert choose_depths([block(0.5), block(0.9), block(0.1)], cost).depths == (0, 3, 0)


def test_nobody_to_draft_for_is_no_case_of_its_own() -> None:
    decision = choose_depths([], CHEAP_ROWS)
    assert decision.depths == ()
    assert decision.tokens_per_sec == 0


# --- break-even ---------------------------------------------------------------------------------


def pays(cost: StepCost, sequences: int, of_model: bool, acceptance: float) -> bool:
    """Whether some pattern beats depth 0, straight from the definition: one token for some of the
    sequences, or up to so many for all of them."""
    patterns = [(some, 1) for some in range(1, sequences + 1)]
    patterns += [(sequences, depth) for depth in range(2, MAX_PASSES + 1)]
    plain = sequences / float(cost.verify_sec[0])
    for some, depth in patterns:
        if some * depth > cost.most:
            continue
        tokens = sequences + some * sum(acceptance**j for j in range(1, depth + 1))
        seconds = float(cost.verify_sec[some * depth])
        if of_model:
            seconds += cost.draft_call_sec + depth * cost.draft_pass_sec
            seconds += some * depth * cost.draft_row_sec
        if tokens / seconds > plain * (1 + 1e-9):
            return True
    return False


def by_bisection(cost: StepCost, sequences: int, of_model: bool) -> float:
    """The least acceptance at which it pays; infinite if it does not even at 1."""
    if not pays(cost, sequences, of_model, 1.0):
        return float("inf")
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(cost, sequences, of_model, middle) else (middle, high)
    return high


@pytest.mark.parametrize("of_model", [False, True], ids=["free", "model"])
@pytest.mark.parametrize("seed", range(60))
def test_break_even_is_where_trying_everything_turns(seed: int, of_model: bool) -> None:
    generator = random.Random(f"{seed} {of_model}")
    sequences = generator.choice([1, 2, 5, 16])
    base = 10 ** generator.uniform(-4, -2)
    row, call, pass_sec, draft_row = (base * 10 ** generator.uniform(-3, -0.3) for _ in range(4))
    most = generator.choice([1, 3, 20, 8 * sequences])
    cost = StepCost(
        verifier(base, row, most, generator.choice([1, 4])), call, pass_sec, draft_row / sequences
    )
    found, expected = break_even(cost, sequences, of_model), by_bisection(cost, sequences, of_model)
    if expected <= 1.0:
        assert found == pytest.approx(expected, abs=1e-6)
    else:
        assert found > 1.0 - 1e-6


@pytest.mark.parametrize("of_model", [False, True], ids=["free", "model"])
@pytest.mark.parametrize("sequences", [1, 8, 64])
def test_above_break_even_depths_are_chosen_and_well_below_it_none(
    sequences: int, of_model: bool
) -> None:
    cost = StepCost(verifier(1e-3 + 1e-5 * sequences, 2e-5, 8 * sequences), 2e-5, 5e-5, 1e-6)
    needed = break_even(cost, sequences, of_model)
    assert 0.0 < needed < 1.0
    make = model if of_model else block
    assert any(choose_depths([make(needed + 0.01)] * sequences, cost).depths)
    assert not any(choose_depths([make(needed * 0.9)] * sequences, cost).depths)


def test_a_draft_models_price_raises_break_even_and_free_tokens_lower_it_to_nothing() -> None:
    cost = StepCost(verifier(1e-3, 2e-5, 64), 1e-4, 1e-4, 1e-6)
    assert break_even(cost, 8, of_model=True) > 2 * break_even(cost, 8, of_model=False) > 0
    assert break_even(StepCost(verifier(1e-3, 0.0, 64)), 8, of_model=False) == 0.0


def test_where_nothing_may_be_drafted_no_acceptance_pays() -> None:
    assert break_even(StepCost(verifier(1e-3, 1e-5, 0)), 8, of_model=False) == float("inf")
    assert break_even(StepCost(verifier(1e-6, 1e-3, 8)), 1, of_model=False) > 1.0


def test_a_drafted_token_must_be_worth_its_own_price_too() -> None:
    """There is room for one: the block's costs nothing more than being verified."""
    cost = StepCost(verifier(1e-3, 1e-4, most=1), 0.0, 0.0, 1e-4)
    assert choose_depths([model(0.9), block(0.6)], cost).depths == (0, 1)
    assert choose_depths([model(0.9), block(0.3)], cost).depths == (1, 0)
