"""Why drafts are taken or left: the reason that a decision gives is the one that holds.

The speculator is the real one; the machine and its proposers are simulated, so that a draft model
is worth its price alone, and is not beside drafts that cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq

import pytest
from engine.routed import FakeModel, Simulation

from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.speculation import Decision, DecisionAction

DRAFT_MODEL, HISTORY = "draft-model", "history"
REPEATED, FRESH = "repeated", "fresh"  # tags of rows
TAGS = (REPEATED,) * 7 + (FRESH,)  # of the sequences in a step
LOOKED_AT = 500  # steps, between questions for decisions
MOST_STEPS = 5000
TOO_LITTLE = re.compile(r"acceptance ([\d.]+) over .*; break-even at \d+ sequences is ([\d.]+)")
BETTER = re.compile(r"it would pay alone .*, but ([\w@-]+), with acceptance [\d.]+, brings more")


class History(Proposer):
    """Drafts for repeated rows, at no cost, and they are nearly always right."""

    name = HISTORY
    seconds = 0.0

    def __init__(self) -> None:
        self.rates = {REPEATED: 0.94}

    def available(self, sequence: Sequence) -> int:
        return 8 if sequence.request.route.tag == REPEATED else 0

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        return [[7] * depth for _, depth in zip(sequences, depths, strict=True)]


def first_taken_out(rate: float, pass_sec: float) -> Decision:
    """Of a draft model with such drafts, that is needed for one row in eight."""
    history = History()
    model = FakeModel(DRAFT_MODEL, {REPEATED: rate, FRESH: rate}, pass_sec)
    simulation = Simulation([model], TAGS, count=0, free=[history])
    simulation.models[HISTORY] = history  # type: ignore[assignment]  # asked for its rates alone
    simulation.running = [simulation._new(tag) for tag in TAGS]
    for _ in range(MOST_STEPS // LOOKED_AT):
        simulation.steps(LOOKED_AT)
        for one in simulation.decisions():
            if one.action is DecisionAction.DISABLED and one.proposer == DRAFT_MODEL:
                return one
    raise AssertionError("the draft model was never taken out, so nothing was tried")


@pytest.mark.parametrize("pass_sec", [0.02, 0.04, 0.06])
def test_a_proposer_that_would_pay_alone_is_not_said_to_be_accepted_too_seldom(
    pass_sec: float,
) -> None:
    """Another one is better: that is the reason."""
    told = first_taken_out(0.8, pass_sec)
    assert told.acceptance is not None
    assert told.break_even is not None
    assert told.acceptance > told.break_even, "it would pay alone"
    assert TOO_LITTLE.search(told.reason) is None, told.reason
    said = BETTER.search(told.reason)
    assert said is not None, told.reason
    assert said[1] == HISTORY


def test_a_proposer_that_pays_nowhere_is_said_to_be_accepted_too_seldom() -> None:
    told = first_taken_out(0.2, 0.06)
    said = TOO_LITTLE.search(told.reason)
    assert said is not None, told.reason
    assert float(said[1]) < float(said[2])
