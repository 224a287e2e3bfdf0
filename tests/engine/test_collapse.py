"""Drafts that stop being accepted in the middle of a job, and such that begin to be: what it costs
beside depth 0, and what is said about it."""

from __future__ import annotations

import numpy as np
import pytest
from engine.simulating import Clock, ModelSource, Simulation, Source, clock, route
from policy.machines import Machine, linear, saturating, stepped

from specbatch.pipeline.policy.depth import StepCost, break_even
from specbatch.pipeline.policy.tuning import HYSTERESIS
from specbatch.schemas.draft_switches import DraftSwitch, DraftSwitches, SwitchScope
from specbatch.schemas.speculation import ALL_PROPOSERS, Decision, DecisionAction

pytestmark = pytest.mark.pipeline  # long simulations

__all__ = ["clock"]
GOOD, BAD = 0.8, 0.05
HALF_STEPS = 2000  # of depth 0, for half of a job
NOISE = 0.03

# On these, drafts accepted at BAD do not pay, and such at GOOD do. Seconds grow with the sequences.
WHERE_IT_TURNS = [
    (linear, 8, "free"),
    (linear, 8, "model"),
    (linear, 32, "model"),
    (stepped, 128, "free"),
    *(
        pytest.param(machine, count, kind, marks=pytest.mark.long)
        for machine, count, kind in [
            (linear, 32, "free"),
            (linear, 128, "free"),
            (linear, 128, "model"),
            (stepped, 128, "model"),
        ]
    ),
]
# Here further tokens are so cheap that even a twentieth of them pays.
WHERE_IT_ALWAYS_PAYS = [(linear, 1), (saturating, 32)]


class Half:
    """Half a job's tokens, and what is told meanwhile."""

    def __init__(self, simulation: Simulation, machine: Machine) -> None:
        count = len(simulation.sequences)
        begun, tokens = simulation.clock.now, simulation.tokens
        while simulation.tokens < tokens + count * HALF_STEPS:
            simulation.step()
        off = machine(count, count) / count * (simulation.tokens - tokens)
        self.loss = (simulation.clock.now - begun) / off - 1.0  # beside depth 0
        self.decisions = simulation.speculator.decision_log.lessons("nightly").decisions

    def told(self, action: DecisionAction) -> list[Decision]:
        return [decision for decision in self.decisions if decision.action is action]


class Job:
    """One job on a simulated machine, drafted for by one source whose acceptance changes."""

    def __init__(self, machine: Machine, count: int, kind: str, clock: Clock) -> None:
        self.machine, self.kind, self.rate = machine, kind, GOOD
        source: Source
        if kind == "free":
            source = Source("block", lambda _: self.rate)
        else:
            source = ModelSource("draft-model", lambda _: self.rate, clock)
        self.source = source
        self.simulation = Simulation(machine, [source], clock, NOISE, replaced_after=300)
        self.simulation.add(count, route=route("nightly"))

    def half(self, rate: float) -> Half:
        self.rate = rate
        return Half(self.simulation, self.machine)


@pytest.mark.parametrize(("machine", "count", "kind"), WHERE_IT_TURNS)
def test_a_collapse_costs_less_than_three_percent_and_says_why(
    machine: Machine, count: int, kind: str, clock: Clock
) -> None:
    job = Job(machine, count, kind, clock)
    first = job.half(GOOD)
    assert [d.action for d in first.decisions] == [DecisionAction.ON]
    second = job.half(BAD)
    assert second.loss < 0.03
    assert [d.action for d in second.decisions[:2]] == [
        DecisionAction.OFF,
        DecisionAction.DISABLED,
    ]
    off, out = second.decisions[:2]
    assert off.proposer == ALL_PROPOSERS
    assert out.proposer == job.source.name
    assert out.acceptance is not None
    assert out.break_even is not None
    assert out.acceptance < out.break_even
    assert BAD < out.break_even < GOOD
    assert out.sequences == off.sequences == count
    for decision in (off, out):
        assert f"{job.source.name}: acceptance" in decision.reason
        assert f"break-even at {count} sequences is" in decision.reason
    assert f"acceptance {out.acceptance:.2f} over" in out.reason
    assert out.reason.endswith(f"is {out.break_even:.2f}")
    # It is tried again, each time after a longer rest, and never taken in.
    assert second.told(DecisionAction.HALF_OPENED)
    assert not second.told(DecisionAction.ENABLED)
    assert not second.told(DecisionAction.ON)
    assert len(second.decisions) < 12, "decisions, not a log"


@pytest.mark.parametrize(
    ("count", "kind"),
    [
        (8, "free"),
        (8, "model"),
        (32, "free"),
        pytest.param(32, "model", marks=pytest.mark.long),
        pytest.param(128, "free", marks=pytest.mark.long),
        pytest.param(128, "model", marks=pytest.mark.long),
    ],
)
def test_bad_drafts_that_become_good_cost_little_and_are_taken_in(
    count: int, kind: str, clock: Clock
) -> None:
    job = Job(linear, count, kind, clock)
    first = job.half(BAD)
    assert first.loss < 0.03
    assert first.told(DecisionAction.OFF)
    of_bad = first.told(DecisionAction.DISABLED)
    assert of_bad
    assert all((out.acceptance or 0.0) < 0.2 for out in of_bad)
    assert not first.told(DecisionAction.ON)
    second = job.half(GOOD)
    again = [*first.told(DecisionAction.HALF_OPENED), *second.told(DecisionAction.HALF_OPENED)][-1]
    (taken,), (on,) = second.told(DecisionAction.ENABLED), second.told(DecisionAction.ON)
    assert not second.told(DecisionAction.OFF)
    outs = second.told(DecisionAction.DISABLED)  # for what was found before they became good
    # A trial may be under way when they become good: then what it found is of both kinds.
    assert len(outs) <= 1
    assert all(out.at < taken.at for out in outs)
    last_out = [*of_bad, *outs][-1]
    assert last_out.acceptance is not None
    assert last_out.break_even is not None
    assert last_out.acceptance < last_out.break_even, "what it was taken out for"
    assert again.proposer == taken.proposer == job.source.name
    assert taken.acceptance is not None
    assert taken.break_even is not None
    assert taken.acceptance >= taken.break_even
    assert f"break-even at {count} sequences is" in taken.reason
    assert job.source.name in on.reason
    assert second.loss < 0.0, "a gain, though it had to be found out first"


@pytest.mark.parametrize("kind", [pytest.param("free", marks=pytest.mark.long), "model"])
def test_a_collapse_that_passes_is_survived_and_gained_from_again(kind: str, clock: Clock) -> None:
    job = Job(linear, 8, kind, clock)
    gain = job.half(GOOD).loss
    assert gain < -0.3
    assert job.half(BAD).loss < 0.03
    back = job.half(GOOD)
    assert back.told(DecisionAction.ENABLED)
    assert back.told(DecisionAction.ON)
    assert job.half(GOOD).loss < gain + 0.03, "as good as if nothing had been"


@pytest.mark.parametrize(("machine", "count"), WHERE_IT_ALWAYS_PAYS)
def test_where_tokens_are_nearly_free_a_collapse_costs_nothing(
    machine: Machine, count: int, clock: Clock
) -> None:
    job = Job(machine, count, "free", clock)
    prices = StepCost(np.array([machine(tokens, count) for tokens in range(count, 9 * count + 1)]))
    needed = break_even(prices, count, of_model=False, margin=HYSTERESIS)
    assert needed < 2 * BAD, "the machine is not what this test is about"
    job.half(GOOD)
    assert job.half(BAD).loss < 0.03


def test_a_job_that_collapses_leaves_the_one_beside_it_alone(clock: Clock) -> None:
    rates = {"nightly": GOOD, "other": GOOD}
    source = Source("block", lambda sequence: rates[sequence.request.route.job])
    simulation = Simulation(linear, [source], clock, NOISE, replaced_after=300)
    for job in rates:
        simulation.add(8, route=route(job))
    simulation.run(1500)
    decision_log = simulation.speculator.decision_log
    assert [d.action for job in rates for d in decision_log.lessons(job).decisions] == [
        DecisionAction.ON
    ] * 2
    rates["nightly"] = BAD
    simulation.run(100)
    assert [d.action for d in decision_log.lessons("nightly").decisions[:1]] == [DecisionAction.OFF]
    source.asked.clear()
    simulation.run(200)
    drafted = dict.fromkeys(rates, 0)
    for sequence, depth in (asked for call in source.asked for asked in call):
        drafted[sequence.request.route.job] += depth
    assert drafted["nightly"] < 0.1 * drafted["other"], "newcomers, until they are known"
    assert decision_log.lessons("other").decisions == ()
    simulation.run(1500)
    told = [d.action for d in decision_log.lessons("nightly").decisions]
    assert told[:2] == [DecisionAction.DISABLED, DecisionAction.HALF_OPENED]
    rates["nightly"] = GOOD
    simulation.run(3000)
    told = [d.action for d in decision_log.lessons("nightly").decisions]
    assert told[-1] in (DecisionAction.ENABLED, DecisionAction.ON)
    assert DecisionAction.ENABLED in told
    assert decision_log.lessons("other").decisions == ()


@pytest.mark.parametrize("kind", ["free", "model"])
@pytest.mark.parametrize("count", [8, pytest.param(64, marks=pytest.mark.long)])
def test_while_drafting_rests_samples_go_on_and_a_recovery_is_noticed(
    count: int, kind: str, clock: Clock
) -> None:
    job = Job(linear, count, kind, clock)
    job.half(GOOD)
    log, source = job.simulation.speculator.decision_log, job.source
    told: list[bool] = []
    log.on_collapse = lambda _job, _proposer, fell: told.append(fell)
    job.half(BAD)
    assert told == [True]
    # The breaker is open for thousands of steps: what is known comes of samples in shadow.
    job.simulation.run_until(lambda: log.rests("nightly", source.name), 4000)
    log.lessons("nightly")
    begun, before, tokens = job.simulation.clock.now, source.took, source.drafted
    for _ in range(4):
        job.simulation.run(1000)
        (samples,) = {c.proposer: c for c in log.lessons("nightly").counts}.values()
        assert samples.tested >= 10
        assert samples.agreed < 0.3 * samples.tested
    assert source.drafted > tokens
    assert source.took - before <= 0.01 * (job.simulation.clock.now - begun)
    assert told == [True], "it is still reported"
    job.rate = GOOD
    job.simulation.run_until(lambda: not log.rests("nightly", source.name), 1500)
    job.simulation.run_until(lambda: told == [True, False], 1500)
    job.simulation.run_until(lambda: job.simulation.drafted >= count, 1500)


def test_what_an_operator_switched_off_is_not_sampled(clock: Clock) -> None:
    job = Job(linear, 8, "model", clock)
    job.half(GOOD)
    job.half(BAD)
    simulation = job.simulation
    simulation.run_until(
        lambda: simulation.speculator.decision_log.rests("nightly", job.source.name), 4000
    )
    everything = DraftSwitch(SwitchScope(), 1.0, "alice", "it is slow")
    simulation.speculator.switch(DraftSwitches((everything,)))
    drafted = job.source.drafted
    simulation.run(2000)
    assert job.source.drafted == drafted
