"""What happens to a job and when: decided by a seed, before anything is started."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from specbatch.schemas.crash_points import CrashPoint


class Deed(StrEnum):
    """What is done at a crash point."""

    KILL = "kill"  # SIGKILL: nothing is put away, no word is said
    FREEZE = "freeze"  # SIGSTOP until after the lease, then SIGCONT: it believes to hold it still
    BREAK = "break"  # the place raises what its disk, link or device raises


@dataclass(frozen=True, slots=True)
class Disturbance:
    """`deed` is done to the worker that reaches `point` for the `nth` time, counted over all."""

    point: CrashPoint
    deed: Deed
    nth: int = 1
    worker: int | None = None  # only this one is counted, and hit
    variant: int = 0  # which of the errors that such a place has

    def __str__(self) -> str:
        who = "a worker" if self.worker is None else f"worker {self.worker}"
        return f"{self.deed} {who} at {self.point}, time {self.nth}"


@dataclass(frozen=True, slots=True)
class Plan:
    """One run: a job, and what is done to it."""

    seed: int
    disturbances: tuple[Disturbance, ...]
    group_size: int
    writes_ahead: bool  # groups pass through the propose stage
    bells: int | None = None  # seeds bells that are doubled, held back and changed in order

    def __str__(self) -> str:
        done = "; ".join(map(str, self.disturbances)) or "nothing"
        return f"seed {self.seed}: {done}{'; unruly bells' if self.bells is not None else ''}"


# How often a small job reaches a place, at the least.
_TIMES = {
    CrashPoint.LEASE: 7,
    CrashPoint.ARTEFACT_WRITE: 4,
    CrashPoint.DRAFT_WRITE: 2,
    CrashPoint.SUBMIT: 2,
    CrashPoint.VERIFY: 4,
    CrashPoint.SQL_COMMIT: 16,
    CrashPoint.COMMITTED: 16,
    CrashPoint.ACK: 6,
    CrashPoint.UPLOAD: 1,
    CrashPoint.MANIFEST: 1,
}
POINTS = tuple(_TIMES)
DEEDS = tuple(Deed)
_FURTHER = (0, 0, 0, 1, 1, 2)  # disturbances after the first one


def plan_of(seed: int, workers: int) -> Plan:
    """The run of a seed. Any thirty seeds in a row have every deed at every point."""
    draw = random.Random(seed)
    first = _at(draw, POINTS[seed % len(POINTS)], DEEDS[seed // len(POINTS) % len(DEEDS)], workers)
    further = [
        _at(draw, draw.choice(POINTS), draw.choice(DEEDS), workers)
        for _ in range(draw.choice(_FURTHER))
    ]
    drafts = any(d.point is CrashPoint.DRAFT_WRITE for d in (first, *further))
    return Plan(
        seed=seed,
        disturbances=(first, *further),
        group_size=draw.choice((3, 4, 6)),
        writes_ahead=drafts or draw.random() < 0.5,
        bells=draw.getrandbits(32) if draw.random() < 0.5 else None,
    )


def _at(draw: random.Random, point: CrashPoint, deed: Deed, workers: int) -> Disturbance:
    return Disturbance(
        point,
        deed,
        nth=draw.randint(1, _TIMES[point]),
        worker=draw.choice((None, draw.randrange(workers))),
        variant=draw.randrange(2),
    )
