"""What a verifier's passes cost: cells, what lies between and beyond them, and hope."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest

from specbatch.pipeline.policy.step_cost import (
    StepTime,
    _batch_bucket,
    _between,
    _never_falling,
)
from specbatch.pipeline.policy.tuning import (
    BEYOND_OPTIMISM,
    CELL_KNOWN,
    CELL_MEMORY,
    CELL_STALE,
    CELL_SURE,
    CURVE_FRESH,
    CURVES_KEPT,
    LEAST_DRIFT,
    NOISE_MEMORY,
    PASS_CLIP,
    STALE_OPTIMISM,
)


def linear(tokens: int, sequences: int) -> float:
    return 1e-3 + 4e-5 * tokens + 2e-5 * sequences


def fed(step_time: StepTime, tokens: int, passes: int, slower: float = 1.0) -> StepTime:
    """So many passes of eight sequences."""
    for _ in range(passes):
        step_time.observe(tokens, 8, slower * linear(tokens, 8))
    return step_time


def well_known() -> StepTime:
    """Many sizes of several numbers of sequences, all alike often, without any noise."""
    step_time = StepTime()
    for _ in range(100):
        for sequences, tokens in itertools.product((2, 4, 8), (8, 16, 24)):
            step_time.observe(tokens, sequences, linear(tokens, sequences))
    return step_time


def cell(step_time: StepTime, tokens: int) -> dict[str, Any]:
    """What is kept of a size of at most 64 tokens of eight sequences."""
    names = ("bucket", "size", "tokens", "sequences", "seconds", "seen", "at")
    rows = [dict(zip(names, row, strict=True)) for row in step_time.state()["cells"]]
    [found] = [row for row in rows if (row["bucket"], row["size"]) == (8, tokens)]
    return found


# --- cells --------------------------------------------------------------------------------------
def test_up_to_eight_sequences_are_told_apart_and_more_by_a_tenth() -> None:
    buckets: dict[int, list[int]] = {}
    for sequences in range(1, 3000):
        buckets.setdefault(_batch_bucket(sequences), []).append(sequences)
    assert list(buckets) == list(range(1, len(buckets) + 1)), "in order, and none is left out"
    assert [buckets[n] for n in range(1, 9)] == [[n] for n in range(1, 9)]
    assert all(sizes[-1] / sizes[0] < 1.15 for sizes in buckets.values())
    assert len(buckets[len(buckets) // 2]) > 1


def test_a_cell_keeps_the_means_of_what_fell_into_it() -> None:
    generator, step_time = random.Random(0), StepTime()
    met = [(generator.randint(129, 144), generator.choice([10, 11])) for _ in range(50)]
    for tokens, sequences in met:
        step_time.observe(tokens, sequences, linear(tokens, sequences))
    [[_, _, tokens, sequences, seconds, seen, at]] = step_time.state()["cells"]
    assert (seen, at) == (50, 50)
    assert tokens == pytest.approx(np.mean([one for one, _ in met]))
    assert sequences == pytest.approx(np.mean([one for _, one in met]))
    assert seconds == pytest.approx(np.mean([linear(*one) for one in met]))


def test_a_size_that_was_not_met_for_long_is_as_good_as_learned_anew() -> None:
    step_time = fed(fed(StepTime(), 20, 40), 8, CELL_STALE - 2)
    fed(step_time, 20, 1, slower=1.1)
    assert cell(step_time, 20)["seen"] == 41, "not yet"
    fed(step_time, 8, CELL_STALE - 1)
    fed(step_time, 20, 1, slower=3.0)
    found = cell(step_time, 20)
    assert found["seen"] == 2
    assert found["seconds"] == pytest.approx(2.0 * linear(20, 8), rel=0.01), "half is new"
    assert not step_time.knows(20, 8)


@pytest.mark.parametrize("passes", [CELL_SURE - 1, CELL_SURE, 100])
def test_a_slow_pass_counts_in_full_until_a_size_is_known_and_little_then(passes: int) -> None:
    step_time = fed(fed(StepTime(), 8, passes), 8, 1, slower=5.0)
    counted = 5.0 if passes < CELL_SURE else PASS_CLIP
    mean = (passes + counted) / (passes + 1)
    assert cell(step_time, 8)["seconds"] == pytest.approx(mean * linear(8, 8))


def test_a_size_is_tried_enough_after_so_many_passes() -> None:
    step_time = StepTime()
    for _ in range(CELL_KNOWN):
        assert not step_time.knows(16, 8)
        fed(step_time, 16, 1)
    assert step_time.knows(16, 8)
    assert not step_time.knows(17, 8)
    assert not step_time.knows(16, 7)


def test_a_size_is_known_at_depth_0_after_some_passes() -> None:
    step_time = StepTime()
    for _ in range(CELL_SURE):
        assert step_time.plain(8) is None
        fed(step_time, 8, 1)
    assert step_time.plain(8) == pytest.approx(linear(8, 8))
    assert step_time.plain(9) is None


# --- drift and noise ----------------------------------------------------------------------------
def test_a_drift_too_small_to_be_told_from_noise_is_none() -> None:
    step_time = fed(StepTime(), 8, 1000)
    fed(step_time, 8, 400, slower=1.0 + 0.9 * LEAST_DRIFT)
    assert step_time.drift == 1.0
    fed(step_time, 8, 40, slower=0.8)
    assert 0.78 < step_time.drift < 1.0 - LEAST_DRIFT


def test_what_slows_all_sizes_does_not_become_the_price_of_the_one_that_is_met() -> None:
    step_time = StepTime()
    for _ in range(2 * CELL_MEMORY):
        fed(fed(step_time, 8, 1), 16, 1)
    before = cell(step_time, 8)["seconds"]
    fed(step_time, 8, CELL_STALE + 1000, slower=1.0 + 0.9 * LEAST_DRIFT)
    assert cell(step_time, 8)["seconds"] == pytest.approx(before, rel=2e-3)
    assert step_time.knows(8, 8), "it was met all the time"
    assert not step_time.knows(16, 8)


def test_a_well_known_size_still_follows_what_it_takes() -> None:
    step_time = fed(StepTime(), 8, 2 * CELL_MEMORY)
    before = cell(step_time, 8)["seconds"]
    fed(step_time, 8, 2 * CELL_MEMORY, slower=1.01)
    assert cell(step_time, 8)["seconds"] == pytest.approx(1.009 * before, rel=1e-3)


def test_a_new_size_is_learned_while_the_drift_is_about_to_change() -> None:
    step_time = fed(StepTime(), 8, 2 * CELL_MEMORY)
    fed(step_time, 8, 60, slower=1.0 + 0.9 * LEAST_DRIFT)
    fed(step_time, 24, 10)
    assert cell(step_time, 24)["seen"] == 10


def test_noise_is_the_mean_distance_from_the_price_and_no_pass_counts_twice_it() -> None:
    step_time = StepTime()
    for _ in range(6 * NOISE_MEMORY):
        for slower in (0.95, 1.05):
            fed(step_time, 8, 1, slower)
    assert step_time.noise == pytest.approx(0.05, rel=0.05)
    before = step_time.noise
    fed(step_time, 8, 1, slower=1000.0)
    assert step_time.noise == pytest.approx(before + (1.0 - before) / NOISE_MEMORY)


# --- the curve ----------------------------------------------------------------------------------
def test_a_number_of_sequences_that_was_never_met_is_priced_by_the_line() -> None:
    step_time = well_known()
    for sequences, tokens in ((6, 12), (20, 40), (1, 1), (64, 200)):
        found = step_time.predict(tokens, sequences)
        assert found == pytest.approx(linear(tokens, sequences), rel=0.01)


def test_a_size_met_once_counts_a_third_beside_the_line() -> None:
    step_time = well_known()
    expected = step_time.predict(40, 8)
    fed(step_time, 40, 1, slower=1.6)
    step_time = StepTime.restored(json.loads(json.dumps(step_time.state())))
    assert CELL_SURE == 3
    assert step_time.predict(40, 8) == pytest.approx(1.2 * expected, rel=0.01)


def test_hope_is_larger_the_seldomer_a_size_was_tried_and_the_more_the_machine_wavers() -> None:
    for noise, passes in itertools.product((0.05, 0.2), (4, 16, 100)):
        step_time = fed(StepTime(noise=noise), 8, passes)
        hoped, known = (step_time.curve(8, 8, 8, hope)[0] for hope in (1.0, 0.0))
        assert hoped / known == pytest.approx(1.0 - 2.0 * step_time.noise / passes**0.5)


def test_what_is_stale_may_be_cheaper_by_now() -> None:
    step_time = fed(fed(StepTime(), 40, 900), 8, CELL_STALE)
    hoped, known = (step_time.curve(40, 8, 40, hope)[0] for hope in (1.0, 0.0))
    assert known == pytest.approx(linear(40, 8), rel=0.01)
    assert hoped == pytest.approx((1.0 - STALE_OPTIMISM) * known)


def test_where_prices_fall_what_is_fresh_is_right() -> None:
    step_time = fed(fed(StepTime(), 16, 900, slower=3.0), 24, CELL_STALE)
    assert step_time.predict(16, 8) == pytest.approx(linear(24, 8), rel=0.01)
    both = fed(fed(StepTime(), 16, 300, slower=3.0), 24, 100)
    mean = (3.0 * 3.0 * linear(16, 8) + linear(24, 8)) / 4.0
    assert both.predict(16, 8) == pytest.approx(mean, rel=0.01), "by how often they were met"
    assert both.predict(24, 8) == pytest.approx(mean, rel=0.01)


def test_a_curve_stands_for_some_passes_and_less_long_while_little_is_known() -> None:
    step_time = StepTime()
    for passes in range(1, 8):
        before = step_time.predict(8, 8)
        step_time.observe(8, 8, 1e-2 * passes)
        assert step_time.predict(8, 8) != before
    fed(step_time, 8, 1000)
    before = step_time.curve(8, 8, 40)
    assert step_time.curve(8, 8, 40) is before
    for _ in range(CURVE_FRESH - 1):
        fed(step_time, 8, 1, slower=1.1)
        assert step_time.curve(8, 8, 40) is before
    fed(step_time, 8, 1, slower=1.1)
    assert step_time.predict(8, 8) > before[0]


def test_however_many_curves_are_asked_for_few_are_kept() -> None:
    step_time = well_known()
    one, other = step_time.curve(8, 8, 9), step_time.curve(8, 8, 10)
    assert step_time.curve(8, 8, 9) is one, "another one does not push it out"
    assert step_time.curve(8, 8, 10) is other
    curves = {last: step_time.curve(8, 8, last).tolist() for last in range(8, 400)}
    assert len(step_time._curves) <= CURVES_KEPT
    assert all(step_time.curve(8, 8, last).tolist() == of for last, of in curves.items())


@pytest.mark.parametrize("seed", range(20))
def test_prices_that_do_not_fall_are_the_nearest_ones_by_weighted_squares(seed: int) -> None:
    """By the minimax formula: of means that begin here or earlier, the least that ends later."""
    generator = random.Random(seed)
    count = generator.randint(1, 9)
    values = np.array([generator.choice([1.0, 2.0, 3.0, 9.0]) for _ in range(count)])
    weights = [generator.choice([0.1, 1.0, 5.0]) for _ in range(count)]

    def mean(first: int, last: int) -> float:
        part = slice(first, last + 1)
        return float(np.average(values[part], weights=weights[part]))

    expected = [
        max(min(mean(first, last) for last in range(i, count)) for first in range(i + 1))
        for i in range(count)
    ]
    assert _never_falling(values, weights).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("optimism", [0.0, 0.5, 1.0])
def test_what_lies_between_beyond_and_before_the_sizes_that_are_known(optimism: float) -> None:
    at, price = np.array([10.0, 20.0, 30.0]), np.array([2.0, 3.0, 5.0])
    tokens = np.arange(4, 41)
    line, expected = 1.0 + 0.1 * tokens, 1.0 + 0.1 * at
    curve = _between(tokens, at, price, line, expected, optimism)
    found = dict(zip(tokens.tolist(), curve.tolist(), strict=True))
    assert (found[10], found[20], found[30]) == (2.0, 3.0, 5.0), "what was tried is known"
    for lower, dearer, size in [(2.0, 0.1, n) for n in range(11, 20)] + [
        (3.0, 0.2, n) for n in range(21, 30)
    ]:
        middle = lower + dearer * (size % 10)
        assert found[size] == pytest.approx(middle - optimism * (middle - lower))
    for size in range(31, 41):
        rise = (1.0 + 0.1 * size) / 4.0 - 1.0
        assert found[size] == pytest.approx(5.0 * (1.0 + rise * (1.0 - BEYOND_OPTIMISM * optimism)))
    for size in range(4, 10):
        assert found[size] == pytest.approx(2.0 * (1.0 + 0.1 * size) / 2.0)


# --- what is kept -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": 0.0},
        {"seconds": -1e-3},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"tokens": 0.0},
        {"tokens": float("inf")},
        {"seen": 0},
    ],
    ids=str,
)
def test_a_cell_that_no_machine_has_is_refused(wrong: dict[str, float]) -> None:
    state = fed(fed(StepTime(), 8, 5), 16, 5).state()
    names = ("bucket", "size", "tokens", "sequences", "seconds", "seen", "at")
    for name, value in wrong.items():
        state["cells"][1][names.index(name)] = value
    with pytest.raises(ValueError, match="invalid cell"):
        StepTime.restored(state)


def test_what_is_kept_of_a_still_machine_and_of_one_sequence_alone_is_read() -> None:
    step_time = StepTime(noise=0.0)
    step_time.observe(1, 1, linear(1, 1))
    again = StepTime.restored(json.loads(json.dumps(step_time.state())))
    assert again.state() == step_time.state()


@pytest.mark.parametrize("older", [["drift"], ["drift", "observations"]])
def test_states_of_earlier_versions_are_read(older: list[str]) -> None:
    known = fed(fed(StepTime(), 8, 90), 16, 60)
    state = known.state()
    for name in older:
        del state[name]
    again = StepTime.restored(state)
    assert (again.drift, again.observations) == (1.0, 150)
    assert again.predict(16, 8) == pytest.approx(known.predict(16, 8))
    assert StepTime.restored(state | {"pace": 1.5}).drift == 1.5
