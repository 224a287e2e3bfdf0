"""Tells the journal what a look found: which drafts pay on which job, and why depth 0 where not."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial

from specbatch.pipeline.engine.wants import Want
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
    for job, of_job in paid.items():
        for name, depth in of_job.items():
            needed = partial(controller.break_even, count, models[name])
            journal.judge(job, name, step, depth > 0, needed, count, believed[job, name])
        rate = {name: believed[job, name] for name in of_job}
        reason = partial(_reason, journal, controller, chosen, job, of_job, rate, models, count)
        journal.turned(job, any(of_job.values()), reason, count)


def _reason(
    journal: Journal,
    controller: Controller,
    chosen: Course,
    job: str,
    paid: Mapping[str, int],
    believed: Mapping[str, float],
    models: Mapping[str, str | None],
    count: int,
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
    return verdict(best, believed[best], tested, needed, count, pays=False)
