"""Plans what happens to a job and when, from a seed, before anything starts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from enum import StrEnum

from specbatch.schemas.crash_points import CrashPoint


class Deed(StrEnum):
    """The deed that a disturbance does at a crash point."""

    KILL = "kill"  # SIGKILL: the process cannot clean up
    FREEZE = "freeze"  # SIGSTOP until after the lease, then SIGCONT: it believes it holds it
    BREAK = "break"  # the place raises an error of its disk, link or device


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Does `deed` to the worker that reaches `point` for the `nth` time, counted over all."""

    point: CrashPoint
    deed: Deed
    nth: int = 1
    worker: int | None = None  # only this one is counted, and hit
    variant: int = 0  # selects one of the place's errors

    def __str__(self) -> str:
        who = "a worker" if self.worker is None else f"worker {self.worker}"
        return f"{self.deed} {who} at {self.point}, time {self.nth}"


class IncidentKind(StrEnum):
    """A temporary change of the surroundings of all workers."""

    MODEL_SWAPPED = "the model's files are replaced under its name, and put back"
    MODELS_MIXED = "workers with other files under the model's name join"
    CLASSES_MIXED = "workers of another numeric class join"
    STORE_RESTORED = "a copy of the store is restored while workers run"
    STORE_RESTORED_STOPPED = "all workers are killed, and start with a copy of the store"
    QUEUE_OF_WRONG_TYPE = "queues become strings"
    UNACKED_GARBAGE = "garbage lies among the unacknowledged messages"
    DISK_FULL = "the disk is full"
    CLOCKS_APART = "clocks of workers are minutes apart"


# A job may have pinned the files or class of joined workers, and would wait without them.
_WHILE_IT_RUNS = (IncidentKind.MODELS_MIXED, IncidentKind.CLASSES_MIXED, IncidentKind.CLOCKS_APART)
_RESTORING = (IncidentKind.STORE_RESTORED, IncidentKind.STORE_RESTORED_STOPPED)


@dataclass(frozen=True, slots=True)
class Incident:
    """An incident begins when so many rows are done, and ends some time later or with the job."""

    kind: IncidentKind
    at_rows: int = 1
    lasts_sec: float = 1.0
    variant: int = 0  # selects between variants of the incident

    def __str__(self) -> str:
        long = f"for {self.lasts_sec:g} s" if math.isfinite(self.lasts_sec) else "while it runs"
        return f"{self.kind} (from row {self.at_rows} on, {long}, variant {self.variant})"


@dataclass(frozen=True, slots=True)
class Plan:
    """One run: a job and its disturbances."""

    seed: int
    disturbances: tuple[Disturbance, ...]
    group_size: int
    writes_ahead: bool  # groups pass through the propose stage
    message_seed: int | None = None  # seeds messages that are doubled, held back, reordered
    incident: Incident | None = None

    @property
    def restores(self) -> bool:
        """Whether an older copy replaces the store."""
        return self.incident is not None and self.incident.kind in _RESTORING

    def __str__(self) -> str:
        all_done = (*([] if self.incident is None else [self.incident]), *self.disturbances)
        done = "; ".join(map(str, all_done)) or "nothing"
        unruly = "" if self.message_seed is None else "; unruly messages"
        return f"seed {self.seed}: {done}{unruly}"


# How often a small job reaches a place at least.
TIMES = {
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
POINTS = tuple(TIMES)
DEEDS = tuple(Deed)
INCIDENTS = tuple(IncidentKind)
_LASTS_SEC = (0.3, 1.0, 2.0)  # shorter than a lease, and longer
_FURTHER = (0, 0, 0, 1, 1, 2)  # disturbances after the first one


def plan_of(seed: int, workers: int) -> Plan:
    """The run of a seed. Any thirty seeds in a row have every deed at every point."""
    draw = random.Random(seed)
    first = _at(draw, POINTS[seed % len(POINTS)], DEEDS[seed // len(POINTS) % len(DEEDS)], workers)
    more = [
        _at(draw, draw.choice(POINTS), draw.choice(DEEDS), workers)
        for _ in range(draw.choice(_FURTHER))
    ]
    drafts = any(d.point is CrashPoint.DRAFT_WRITE for d in (first, *more))
    return Plan(
        seed=seed,
        disturbances=(first, *more),
        group_size=draw.choice((3, 4, 6)),
        writes_ahead=drafts or draw.random() < 0.5,
        message_seed=draw.getrandbits(32) if draw.random() < 0.5 else None,
    )


def incident_plan_of(seed: int, workers: int) -> Plan:
    """The run of a seed with an incident, and often a disturbance besides. Any nine seeds in a row
    have every kind of incident."""
    draw = random.Random(f"incident {seed}")
    kind = INCIDENTS[seed % len(INCIDENTS)]
    # Of any worker, because the incident decides which one does the work.
    disturbances = tuple(
        replace(_at(draw, draw.choice(POINTS), draw.choice(DEEDS), workers), worker=None)
        for _ in range(draw.choice((0, 1, 1)))
    )
    drafts = any(d.point is CrashPoint.DRAFT_WRITE for d in disturbances)
    return Plan(
        seed=seed,
        disturbances=disturbances,
        group_size=draw.choice((3, 4, 6)),
        writes_ahead=drafts or draw.random() < 0.5,
        message_seed=draw.getrandbits(32) if draw.random() < 0.3 else None,
        incident=Incident(
            kind,
            at_rows=draw.choice((1, 1, 4, 7)),
            lasts_sec=math.inf if kind in _WHILE_IT_RUNS else draw.choice(_LASTS_SEC),
            variant=draw.getrandbits(16),
        ),
    )


def _at(draw: random.Random, point: CrashPoint, deed: Deed, workers: int) -> Disturbance:
    return Disturbance(
        point,
        deed,
        nth=draw.randint(1, TIMES[point]),
        worker=draw.choice((None, draw.randrange(workers))),
        variant=draw.randrange(2),
    )
