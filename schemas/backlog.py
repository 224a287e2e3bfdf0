"""What waits and who works, in the whole store at one moment. Seconds are by the store's clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.provenance import TICKS_PER_SEC
from specbatch.schemas.records import JobState, Stage
from specbatch.schemas.timekeeping import Device

# Stages at which a unit can be claimed, in the order of a job's life. INGEST and PUBLISH are of
# jobs, the others of groups.
WORK = (Stage.INGEST, Stage.PROPOSE, Stage.VERIFY, Stage.RECORD, Stage.PUBLISH)


@dataclass(frozen=True, slots=True)
class StageBacklog:
    """Units at one stage. Inputs that are paused are not counted: nobody may have them."""

    stage: Stage
    ready: int = 0  # anybody may claim them
    leased: int = 0  # somebody works on them
    expired: int = 0  # of the ready ones: their lease ran out, and nobody has taken over
    oldest_ready_sec: float | None = None  # how long the oldest ready one has waited


@dataclass(frozen=True, slots=True)
class WorkerNow:
    """A device in a worker process that has not ended, or is not known to have."""

    session_id: str
    owner: str
    device: Device
    age_sec: float  # since its beginning
    silent_sec: float  # since it was heard of last
    seen: int  # ticks since its beginning, when it was heard of
    idle: int  # of these: it held no work
    overhead: int  # of these: it held some, and no step of an engine ran
    leases: int = 0  # groups that its process holds
    serves: Serves | None = None  # what it verifies with; None: it verifies nothing

    @property
    def busy_share(self) -> float | None:
        """Of all its time so far, what engines' steps had; None before it was heard of."""
        return self.busy_ticks / self.seen if self.seen else None

    @property
    def busy_ticks(self) -> int:
        return max(0, self.seen - self.idle - self.overhead)

    @property
    def usd(self) -> float:
        """What it has cost so far."""
        return self.seen / TICKS_PER_SEC / 3600 * self.device.price_microusd / 1e6


@dataclass(frozen=True, slots=True)
class PinnedJob:
    """A live job with groups to verify, and the numeric class that it has pinned."""

    job_id: str
    model: str
    numeric_class: str
    key: str  # how it asks for its engine, in the class's dtype

    def served_by(self, workers: Iterable[WorkerNow]) -> list[str]:
        """The classes in which these workers would run it, sorted."""
        told = [one.serves for one in workers if one.serves and one.serves.model == self.model]
        return sorted({name for serves in told if (name := serves.class_of(self.key))})

    def waits(self, workers: Iterable[WorkerNow]) -> str | None:
        """In words, that none of these workers may verify it; None: one may."""
        alive = self.served_by(workers)
        if self.numeric_class in alive:
            return None
        there = ", ".join(alive) or "none"
        return f"waits for a worker of numeric class {self.numeric_class}; alive: {there}"


@dataclass(frozen=True, slots=True)
class Backlog:
    """One look at the store."""

    at: float  # seconds since the epoch
    stages: tuple[StageBacklog, ...]  # one for each of `WORK`, in that order
    jobs: Mapping[JobState, int]  # those that are not over: QUEUED and RUNNING, zeros too
    rows_failed: int  # of these jobs: quarantined, or finished with an error
    workers: tuple[WorkerNow, ...]  # by owner
    pinned: tuple[PinnedJob, ...] = ()  # by id

    def waiting(self, silence_sec: float = math.inf) -> dict[str, str]:
        """What jobs wait for, in words, by id: those whose class no live worker has.

        Workers that were not heard of for longer than `silence_sec` are held for dead.
        """
        alive = [worker for worker in self.workers if worker.silent_sec <= silence_sec]
        found = {job.job_id: job.waits(alive) for job in self.pinned}
        return {job_id: words for job_id, words in found.items() if words is not None}

    def at_stage(self, stage: Stage) -> StageBacklog:
        return next((s for s in self.stages if s.stage is stage), StageBacklog(stage))
