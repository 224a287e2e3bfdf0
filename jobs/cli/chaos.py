"""`specbatch chaos`: a small job again and again, with disturbed workers and surroundings."""

from __future__ import annotations

import contextlib
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbatch.jobs.cli.console import remark, say, say_json
from specbatch.schemas.extras import require_engine_extra

if TYPE_CHECKING:
    from specbatch.jobs.chaos.harness import Ran

BROKEN = 1
STEP_SEC = 0.01  # of the stand-in: incidents are to happen in the midst of a job


class EngineChoice(StrEnum):
    """What generates."""

    STAND_IN = "stand-in"
    REAL = "real"
    VLLM = "vllm"


def chaos(
    runs: Annotated[int, typer.Option(help="disturbed jobs, one after another", min=1)] = (20),
    seed: Annotated[
        int, typer.Option(help="seed of the first run; each further one adds 1", min=0)
    ] = 0,
    engine: Annotated[
        EngineChoice,
        typer.Option(help="stand-in: tokens from a hash; real or vllm: the demo pair"),
    ] = EngineChoice.STAND_IN,
    workers: Annotated[int, typer.Option(help="worker processes", min=2, max=16)] = 2,
    redis: Annotated[
        str | None, typer.Option(help="an empty Redis database; by default one is started")
    ] = None,
    incidents: Annotated[
        bool, typer.Option(help="every other run changes what all workers depend on")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on one line")] = False,
) -> None:
    """Kill, freeze and cut off workers at seeded points; exit with 1 unless nothing was lost.

    Every other run also swaps models, mixes fleets, restores the store from a copy, breaks Redis'
    structures, fills the disk or sets clocks wrong; the demo pair's files are left as they are.
    Everything happens in a temporary folder, on SQLite and Redis.
    """
    require_engine_extra()
    from specbatch.jobs.chaos.harness import site
    from specbatch.jobs.chaos.plan import incident_plan_of, plan_of
    from specbatch.jobs.chaos.private_redis import private_redis, refuse_used

    notify = (lambda _: None) if json else say  # the one line of JSON is all that is wanted
    is_real = engine is not EngineChoice.STAND_IN
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specbatch-chaos-")))
        if redis is None:
            redis = stack.enter_context(private_redis(folder))
        else:
            refuse_used(redis)
        remark(f"{workers} workers with the {engine.value} engine; one undisturbed job first")
        here = stack.enter_context(
            site(
                folder,
                redis,
                engine=engine.value,
                workers=workers,
                step_sec=0.0 if is_real else STEP_SEC,
                notify=notify,
            )
        )
        ran = []
        for number in range(seed, seed + runs):
            has_incident = incidents and not is_real and number % 2
            plan = (incident_plan_of if has_incident else plan_of)(number, workers)
            notify(str(plan))
            ran.append(here.run(plan))
            for violation in ran[-1].violations:
                notify(f"  BROKEN: {violation}")
    _conclude(ran, json)


def _conclude(ran: list[Ran], json: bool) -> None:
    """The conservation report of all runs together."""
    reports = [report for one in ran for report in one.reports]
    keys = ("submitted", "ok", "failed", "cancelled", "pending")
    totals = {key: sum(getattr(r.census, key) for r in reports) for key in keys}
    violations = [v for one in ran for v in one.violations]
    happened = sum(r.plan.incident is not None and r.happened for r in ran)
    fired, missed = sum(len(r.fired) for r in ran), sum(len(r.missed) for r in ran)
    if json:
        say_json(
            {
                "runs": len(ran),
                "jobs": len(reports),
                "disturbances": fired,
                "never_reached": missed,
                "incidents": happened,
                "workers_restarted": sum(r.restarts for r in ran),
                **totals,
                "violations": violations,
            }
        )
    else:
        say("")
        done = f"{fired} disturbances ({missed} never reached), {happened} incidents"
        say(f"{len(ran)} runs, {len(reports)} jobs, {done}")
        parts = " + ".join(f"{key} {totals[key]}" for key in keys[1:])
        sign = "=" if sum(totals[key] for key in keys[1:]) == totals["submitted"] else "≠"
        say(f"submitted {totals['submitted']} {sign} {parts}")
        say(
            "each key once, all files as listed, all outputs those of the undisturbed job"
            if not violations
            else f"{len(violations)} invariants violated, see above"
        )
    if violations:
        raise typer.Exit(BROKEN)
