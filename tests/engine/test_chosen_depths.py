"""Depths of the whole speculator, estimates and looks and trials included, beside the best."""

from __future__ import annotations

import pytest
from engine.simulating import Clock, Simulation, Source, clock
from policy.machines import Machine, best, linear, saturating, stepped

from support.grids import pairwise

pytestmark = pytest.mark.pipeline  # long simulations

__all__ = ["clock"]

WARM, STEPS, OUTPUT_TOKENS = 800, 1200, 128


@pairwise(
    acceptance=[0.0, 0.3, 0.5, 0.7, 0.9], count=[8, 32], machine=[linear, stepped, saturating]
)
def test_what_is_chosen_comes_near_the_best_there_is(
    machine: Machine, count: int, acceptance: float, clock: Clock
) -> None:
    """Within 5 %: acceptance is learned from coin tosses, and the machine's times are noisy."""
    made = Simulation(
        machine, [Source("a", acceptance)], clock, noise=0.05, replaced_after=OUTPUT_TOKENS
    )
    made.add(count)
    made.run(WARM)
    tokens, began = made.tokens, clock.now
    made.run(STEPS)
    reached = (made.tokens - tokens) / (clock.now - began)
    assert reached >= 0.95 * best(machine, [acceptance] * count)
