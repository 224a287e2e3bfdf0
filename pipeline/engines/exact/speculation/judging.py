"""Tells the journal what a look found: which drafts pay on which job, and why depth 0 where not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial

from specbatch.pipeline.engines.exact.speculation.wants import Want
from specbatch.pipeline.policy.controller import Controller, Course
from specbatch.pipeline.policy.journal import Journal, verdict


def judge(
    journal: Journal,
    controller: Controller,
    chosen: Course,
    wants: Seq[Want],
    step: int,
    count: int,
) -> None:
    """Enter a look's choice, by job and proposer. `count`: sequences in the step."""
    paid: dict[str, dict[str, int]] = {}  # draft tokens by job and proposer
    rates: dict[tuple[str, str], list[float]] = {}
    models: dict[str, str | None] = {}
    for want, depth in zip(wants, chosen.depths, strict=True):
        of_job = paid.setdefault(want.sequence.request.route.job, {})
        name = want.proposer.name
        of_job[name] = of_job.get(name, 0) + depth
        models[name] = want.model
        rates.setdefault((want.sequence.request.route.job, name), []).append(want.rate)
    believed = {key: sum(of) / len(of) for key, of in rates.items()}
    rivals = _by_tokens(paid, rates)
    for job, of_job in paid.items():
        for name, depth in of_job.items():
            needed = partial(controller.break_even, count, models[name])
            rival = next((of for of in rivals if of[0] != name), None)
            told = (needed, count, believed[job, name], rival)
            journal.judge(job, name, step, depth > 0, *told)
        rate = {name: believed[job, name] for name in of_job}
        reason = partial(
            _reason, journal, controller, chosen, job, of_job, rate, models, count, rivals
        )
        journal.turned(job, any(of_job.values()), reason, count)


def _by_tokens(
    paid: Mapping[str, Mapping[str, int]], rates: Mapping[tuple[str, str], Seq[float]]
) -> list[tuple[str, float]]:
    """Proposers that draft, of whichever job, with their acceptance; those that draft most first.

    The jobs of a step share its price, so what is drafted for one may be why another rests.
    """
    tokens: Counter[str] = Counter()
    for of_job in paid.values():
        tokens.update(of_job)
    found = []
    for name, drafted in tokens.most_common():
        if drafted:
            of = [rate for (_, maker), mine in rates.items() if maker == name for rate in mine]
            found.append((name, sum(of) / len(of)))
    return found


def _reason(
    journal: Journal,
    controller: Controller,
    chosen: Course,
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
    _, tested = journal.tracks.rate_of(best, job)
    needed = controller.break_even(count, models[best])
    rival = next((of for of in rivals if of[0] != best), None)
    return verdict(best, believed[best], tested, needed, count, pays=False, rival=rival)
