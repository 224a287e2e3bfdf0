"""What could be drafted for a sequence, by whom, and which decisions follow for its job."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.policy import tuning
from specbatch.pipeline.policy.breaker import DecisionLog, verdict
from specbatch.pipeline.policy.depth import Candidate, Controller, DepthSchedule

Choice = tuple[Proposer, int]  # who drafts, and how many tokens


@dataclass(slots=True, eq=False)  # not frozen: thousands are made a second
class Option:
    """One source for a sequence, as a replan found it."""

    sequence: Sequence
    proposer: Proposer
    limit: int
    rate: float
    score: float  # acceptance, less what its drafts cost

    @property
    def model(self) -> str | None:
        return model_of(self.proposer)


def candidates(picked: Seq[Option]) -> list[Candidate]:
    return [Candidate(w.limit, w.rate, w.model) for w in picked]


def model_of(proposer: Proposer) -> str | None:
    """The draft model's name; None: its drafts are free."""
    return None if proposer.pass_time is None else proposer.name


def depth_worth(rate: float, least_worth: float, most: int) -> int:
    """How many draft tokens of this acceptance are worth so much each."""
    if rate >= tuning.SURE_RATE:
        return most
    return max(1, min(most, int(math.log(least_worth) / math.log(rate))))


def choices(picked: Seq[Option], depths: Seq[int]) -> dict[Sequence, Choice]:
    pairs = zip(picked, depths, strict=True)
    return {option.sequence: (option.proposer, depth) for option, depth in pairs}


def usual(chosen: Seq[tuple[Option, int]]) -> Choice:
    """The best source of some sequences, and how deep it is followed on average."""
    leader = max(chosen, key=lambda c: c[0].rate)[0].proposer
    depths = [depth for option, depth in chosen if option.proposer is leader]
    return leader, round(sum(depths) / len(depths))


# --- decisions ----------------------------------------------------------------------------------


def record_decisions(
    decision_log: DecisionLog,
    controller: Controller,
    chosen: DepthSchedule,
    picked: Seq[Option],
    step: int,
    count: int,
) -> None:
    """Record a replan's choice by job and proposer. `count`: sequences in the step."""
    paid: dict[str, dict[str, int]] = {}  # draft tokens by job and proposer
    rates: dict[tuple[str, str], list[float]] = {}
    models: dict[str, str | None] = {}
    for option, depth in zip(picked, chosen.depths, strict=True):
        of_job = paid.setdefault(option.sequence.request.route.job, {})
        name = option.proposer.name
        of_job[name] = of_job.get(name, 0) + depth
        models[name] = option.model
        rates.setdefault((option.sequence.request.route.job, name), []).append(option.rate)
    believed = {key: sum(of) / len(of) for key, of in rates.items()}
    rivals = _by_tokens(paid, rates)
    for job, of_job in paid.items():
        for name, depth in of_job.items():
            needed = partial(controller.break_even, count, models[name])
            rival = next((of for of in rivals if of[0] != name), None)
            figures = (needed, count, believed[job, name], rival)
            decision_log.record_verdict(job, name, step, depth > 0, *figures)
        rate = {name: believed[job, name] for name in of_job}
        reason = partial(
            _reason, decision_log, controller, chosen, job, of_job, rate, models, count, rivals
        )
        decision_log.record_drafting(job, any(of_job.values()), reason, count)


def _by_tokens(
    paid: Mapping[str, Mapping[str, int]], rates: Mapping[tuple[str, str], Seq[float]]
) -> list[tuple[str, float]]:
    """Proposers that draft, of whichever job, with their acceptance; those that draft most first.

    The jobs of a step share its price, so drafts for one may be why another goes without.
    """
    tokens: Counter[str] = Counter()
    for of_job in paid.values():
        tokens.update(of_job)
    found = []
    for name, drafted in tokens.most_common():
        if drafted:
            of = [
                rate for (_, proposer), mine in rates.items() if proposer == name for rate in mine
            ]
            found.append((name, sum(of) / len(of)))
    return found


def _reason(
    decision_log: DecisionLog,
    controller: Controller,
    chosen: DepthSchedule,
    job: str,
    paid: Mapping[str, int],
    believed: Mapping[str, float],
    models: Mapping[str, str | None],
    count: int,
    rivals: Seq[tuple[str, float]],
) -> str:
    if any(paid.values()):
        best = max(paid, key=lambda name: paid[name])
        return (
            f"drafts, most of them by {best}, promise {chosen.gain:.2f} times the tokens of "
            f"depth 0 with {count} sequences in a step"
        )
    best = max(paid, key=lambda name: believed[name])
    _, tested = decision_log.tracks.rate_of(best, job)
    needed = controller.break_even(count, models[best])
    rival = next((of for of in rivals if of[0] != best), None)
    return verdict(best, believed[best], tested, needed, count, pays=False, rival=rival)
