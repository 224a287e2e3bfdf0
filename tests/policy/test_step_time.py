"""The step-time model on machines of known shape: linear, stepped, noisy, interrupted."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Callable

import pytest

from specbatch.pipeline.policy import tuning
from specbatch.pipeline.policy.step_cost import LinearCost, StepTime, _token_bucket

Machine = Callable[[int, int], float]


def linear(tokens: int, sequences: int) -> float:
    return 1e-3 + 4e-5 * tokens + 2e-5 * sequences


def stepped(tokens: int, sequences: int) -> float:
    """Tiles of sixteen tokens, as matrix units work."""
    return 8e-4 + 5e-4 * -(-tokens // 16) + 1e-5 * sequences


def observed(machine: Machine, sequences: int, depths: list[int], steps: int = 400) -> StepTime:
    generator, step_time = random.Random(0), StepTime()
    for _ in range(steps):
        tokens = sequences * (1 + generator.choice(depths))
        step_time.observe(tokens, sequences, machine(tokens, sequences))
    return step_time


@pytest.mark.parametrize("machine", [linear, stepped])
@pytest.mark.parametrize("sequences", [1, 4, 8, 32])
def test_what_has_been_tried_is_known_within_two_percent(machine: Machine, sequences: int) -> None:
    step_time = observed(machine, sequences, [0, 1, 2, 3])
    for depth in range(4):
        tokens = sequences * (1 + depth)
        if sequences == 1 and machine is stepped:
            continue  # one range of sizes
        expected = machine(tokens, sequences)
        assert step_time.predict(tokens, sequences) == pytest.approx(expected, rel=0.02)


def test_a_linear_machine_is_known_where_it_was_never_tried() -> None:
    step_time = observed(linear, 8, [0, 1, 2])
    for tokens in (40, 64, 200):
        assert step_time.predict(tokens, 8) == pytest.approx(linear(tokens, 8), rel=0.05)


def test_the_curve_never_falls() -> None:
    step_time = observed(lambda tokens, _: 1e-3 if tokens > 20 else 2e-3, 8, [0, 1, 2, 3])
    curve = step_time.curve(8, 8, 200)
    assert len(curve) == 193
    assert all(a <= b for a, b in itertools.pairwise(curve))


def test_a_step_in_which_the_system_slept_changes_little() -> None:
    step_time = observed(linear, 8, [0, 1, 2])
    before = step_time.predict(16, 8)
    step_time.observe(16, 8, 3.0)
    assert step_time.predict(16, 8) < 1.6 * before


def test_a_machine_that_changes_is_followed() -> None:
    step_time = observed(linear, 8, [0, 1, 2])
    generator = random.Random(1)
    for _ in range(600):
        tokens = 8 * (1 + generator.choice([0, 1, 2]))
        step_time.observe(tokens, 8, 3 * linear(tokens, 8))
    assert step_time.predict(16, 8) == pytest.approx(3 * linear(16, 8), rel=0.1)


def test_a_slower_hour_makes_no_size_dearer_than_another() -> None:
    """What was met in a fast hour and what is met in a slow one stay comparable."""
    step_time, generator = observed(linear, 8, [0, 1, 2]), random.Random(4)
    for _ in range(600):  # one size alone, by turns with a few passes of depth 0
        for tokens in (24, 24, 24, 8):
            seconds = 1.8 * linear(tokens, 8) * generator.lognormvariate(0.0, 0.05)
            step_time.observe(tokens, 8, seconds)
    for tokens, error in ((8, 0.1), (16, 0.12), (24, 0.1)):  # 16 was never met again
        assert step_time.predict(tokens, 8) == pytest.approx(1.8 * linear(tokens, 8), rel=error)
    assert step_time.plain(8) == pytest.approx(1.8 * linear(8, 8), rel=0.1)
    again = StepTime.restored(json.loads(json.dumps(step_time.state())))
    assert again.predict(16, 8) == pytest.approx(step_time.predict(16, 8))


def test_a_pace_that_creeps_does_not_become_the_price_of_the_only_size_met() -> None:
    """Deviations of 6 % over 3,000 passes: the other must not look cheaper or dearer."""
    errors = []
    for seed in range(10):
        generator, step_time, slow = random.Random(seed), StepTime(), 0.0
        for step in range(6000):
            slow = (1 - 1 / 3000) * slow + generator.gauss(0.0, 0.06 * (2 / 3000) ** 0.5)
            tokens = 24 if step < 600 and step % 2 else 8
            step_time.observe(tokens, 8, tokens * 1e-4 * generator.lognormvariate(slow, 0.05))
        ratio = step_time.predict(24, 8) / step_time.predict(8, 8)
        errors.append(abs(ratio / 3.0 - 1.0))
    assert statistics.mean(errors) < 0.013


def test_a_pace_that_leaps_down_and_climbs_back_leaves_prices_alone() -> None:
    """As a shared machine does it, with passes now and then that take much longer."""
    generator, step_time = random.Random(2), StepTime()
    for step in range(10_000):
        drift = 0.7 + 0.5 * (step % 1200) / 1200
        tokens = 12 if step < 1200 and step % 2 else 4
        slow = generator.expovariate(2.0) if generator.random() < 0.08 else 0.0
        seconds = drift * generator.lognormvariate(0.0, 0.07) * (1.0 + slow)
        step_time.observe(tokens, 4, seconds * (1.8e-3 if tokens == 12 else 1.2e-3))
    ratio = step_time.predict(12, 4) / step_time.predict(4, 4)
    assert ratio == pytest.approx(1.5, rel=0.06), "it was 1.26"


def test_noise_alone_is_no_other_pace() -> None:
    step_time, generator = observed(linear, 8, [0, 1, 2]), random.Random(6)
    for _ in range(3000):
        tokens = generator.choice([8, 16, 24])
        step_time.observe(tokens, 8, linear(tokens, 8) * generator.lognormvariate(0.0, 0.1))
    assert step_time.drift == pytest.approx(1.0, abs=0.08)
    assert step_time.predict(16, 8) == pytest.approx(linear(16, 8), rel=0.04)


def test_a_busy_moment_is_soon_forgotten() -> None:
    step_time = observed(linear, 8, [0, 1, 2])
    for _ in range(200):
        step_time.observe(16, 8, linear(16, 8))
    before = step_time.predict(16, 8) / step_time.predict(24, 8)
    for _ in range(40):
        step_time.observe(16, 8, 2.5 * linear(16, 8))
    for _ in range(60):
        step_time.observe(16, 8, linear(16, 8))
    assert step_time.predict(16, 8) / step_time.predict(24, 8) == pytest.approx(before, rel=0.03)
    assert step_time.predict(16, 8) == pytest.approx(linear(16, 8), rel=0.1)


@pytest.mark.parametrize("drift", [0.0, -1.0, float("nan"), float("inf")])
def test_a_drift_that_no_machine_has_is_refused(drift: float) -> None:
    state = observed(linear, 8, [0, 1, 2]).state() | {"drift": drift}
    with pytest.raises(ValueError, match="invalid drift"):
        StepTime.restored(state)


def test_a_tokens_price_is_unknown_until_drafts_were_verified() -> None:
    step_time = StepTime()
    for _ in range(20):
        step_time.observe(8, 8, linear(8, 8))
    assert not step_time.has_slope
    for _ in range(3):
        step_time.observe(16, 8, linear(16, 8))
    assert step_time.has_slope


def test_state_survives_json() -> None:
    step_time = observed(stepped, 8, [0, 1, 2])
    again = StepTime.restored(json.loads(json.dumps(step_time.state())))
    assert again.curve(8, 8, 100).tolist() == step_time.curve(8, 8, 100).tolist()
    assert again.observations == step_time.observations
    assert again.has_slope
    with pytest.raises((KeyError, TypeError, ValueError)):
        StepTime.restored({"linear": {"gram": [[1.0]]}})


def test_a_size_that_was_not_met_for_long_is_tried_again_after_a_restart_too() -> None:
    step_time = StepTime()
    for _ in range(60):
        step_time.observe(20, 8, linear(20, 8))
    for _ in range(7999):
        step_time.observe(8, 8, linear(8, 8))
    assert step_time.knows(20, 8)
    again = StepTime.restored(json.loads(json.dumps(step_time.state())))
    assert again.knows(20, 8)
    again.observe(8, 8, linear(8, 8))
    assert not again.knows(20, 8)
    assert again.knows(8, 8)


def test_a_state_that_does_not_say_when_a_size_was_met_counts_as_met_just_now() -> None:
    state = observed(linear, 8, [0, 1, 2]).state()
    state["cells"] = [row[:6] for row in state["cells"]]
    again = StepTime.restored(json.loads(json.dumps(state)))
    assert again.knows(16, 8)
    assert all(row[6] == again.observations for row in again.state()["cells"])


@pytest.mark.parametrize("at", [-1, 401, float("nan"), float("inf")])
def test_a_size_met_at_no_time_that_was_is_refused(at: float) -> None:
    state = observed(linear, 8, [0, 1, 2]).state()
    state["cells"][0][6:] = [at]
    with pytest.raises(ValueError, match=r"invalid observation: .* of 400"):
        StepTime.restored(state)


@pytest.mark.parametrize("items", [5, 8])
def test_a_row_of_another_length_is_refused(items: int) -> None:
    state = observed(linear, 8, [0, 1, 2]).state()
    state["cells"][0] = (state["cells"][0] + [1])[:items]
    with pytest.raises(ValueError, match="values to unpack"):
        StepTime.restored(state)


@pytest.mark.parametrize("sequences", [100, 1000, 16_000, 40_000])
def test_hope_reaches_as_far_as_nothing_was_tried_however_large_a_pass_is(sequences: int) -> None:
    step_time, last = StepTime(), sequences + 1000
    for _ in range(120):
        for tokens in (sequences, last):
            step_time.observe(tokens, sequences, linear(tokens, sequences))
    low, *between, high = step_time.curve(sequences, sequences, last, 1.0).tolist()
    assert len(between) == 999
    assert between[500] == pytest.approx(low, abs=1e-3), "it may cost no more than the smaller one"
    assert high == pytest.approx(linear(last, sequences), rel=0.01)
    middle = linear(sequences + 501, sequences)
    assert step_time.predict(sequences + 501, sequences) == pytest.approx(middle, rel=0.01)


def test_no_weight_is_negative_whatever_is_observed() -> None:
    cost, generator = LinearCost([1e-3, 1e-5]), random.Random(2)
    for _ in range(200):
        cost.observe((1.0, generator.random() * 100), generator.random() * 1e-3)
        assert min(cost.weights) >= 0


def test_a_draft_call_in_which_the_system_slept_counts_as_the_most_that_is_believed() -> None:
    cost = LinearCost([1e-3, 1e-5])
    for size in range(1, 2 * tuning.DRAFT_TRUST_AFTER):
        assert cost.observe((1.0, size), 1e-3 + 1e-5 * size) == 1e-3 + 1e-5 * size
    expected = cost.predict((1.0, 10.0))
    assert cost.observe((1.0, 10.0), 30.0) == pytest.approx(tuning.DRAFT_CLIP * expected)


def test_the_state_of_a_cost_holds_the_calls_that_no_fit_has_read_yet() -> None:
    cost = LinearCost([1.0, 1.0])
    for size in range(tuning.DRAFT_TRUST_AFTER):
        cost.observe((1.0, size), 2e-3 + 1e-5 * size)
    for size in range(tuning.DRAFT_READ_AT_ONCE - 1):
        cost.observe((1.0, size), 3e-3 + 1e-5 * size)
    again = LinearCost([1.0, 1.0])
    again.restore(json.loads(json.dumps(cost.state())))
    cost.solve()
    assert again.weights == pytest.approx(cost.weights)
    assert again.predict((1.0, 8.0)) > 2.3e-3, "the last calls took 3 ms"


def test_larger_passes_share_cells_whose_right_edge_is_a_multiple_of_their_width() -> None:
    cells: dict[int, list[int]] = {}
    for tokens in range(1, 513):
        cells.setdefault(_token_bucket(tokens), []).append(tokens)
    assert list(cells) == list(range(1, len(cells) + 1)), "in order, and none is left out"
    for sizes in cells.values():
        width = 1 if sizes[-1] <= 64 else 4 if sizes[-1] <= 128 else 16
        assert len(sizes) == width
        assert sizes[-1] % width == 0


def test_a_size_met_once_lies_between_what_was_met_and_what_the_others_say() -> None:
    step_time = observed(linear, 8, [0, 1, 2])
    step_time.observe(64, 8, 3 * linear(64, 8))
    assert 1.2 * linear(64, 8) < step_time.predict(64, 8) < 2.5 * linear(64, 8)


@pytest.mark.parametrize("noise", [-0.1, 1.5, float("nan")])
def test_a_noise_that_no_machine_has_is_refused(noise: float) -> None:
    state = observed(linear, 8, [0, 1, 2]).state() | {"noise": noise}
    with pytest.raises(ValueError, match="invalid noise"):
        StepTime.restored(state)
