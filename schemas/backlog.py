"""What waits and who works, in the whole store at one moment. Seconds are by the store's clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbatch.schemas.fingerprint import differing, listed, shown
from specbatch.schemas.numeric_class import UNKNOWN, Serves, key_of_spec
from specbatch.schemas.presence import ProcessNow, alive_words
from specbatch.schemas.provenance import TICKS_PER_SEC
from specbatch.schemas.records import JobRow, JobState, Stage
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
class Alive:
    """Workers that were heard of lately."""

    workers: tuple[WorkerNow, ...] = ()
    processes: tuple[ProcessNow, ...] = ()

    def verifying(self) -> list[WorkerNow]:
        """Those that may verify: all but those whose process can take no messages."""
        deaf = {one.process.owner for one in self.processes if one.trouble is not None}
        return [one for one in self.workers if one.owner not in deaf]

    def lacks(self, stage: Stage, model: str | None = None) -> bool:
        """Whether nobody takes messages for units at this stage. Workers of an earlier release
        tell nothing of themselves but their sessions: where one is there, nothing is known to
        lack."""
        known = {one.process.owner for one in self.processes}
        if any(one.owner not in known for one in self.workers):
            return False
        return not any(one.does(stage, model) and one.trouble is None for one in self.processes)

    def words(self) -> str:
        """Which kinds of workers are there."""
        return alive_words(self.processes)

    def troubled(self, stage: Stage, model: str | None = None) -> str:
        """Those that are there for this stage and can take no messages, in words behind a comma."""
        owners = [
            one.process.owner for one in self.processes if one.trouble and one.does(stage, model)
        ]
        return f"; {_joined(owners)} can take no messages from the broker" if owners else ""


@dataclass(frozen=True, slots=True)
class PinnedJob:
    """A live job, what it has pinned, and the stages at which it has something to be done."""

    job_id: str
    model: str
    numeric_class: str | None
    key: str  # how it asks for its engine, in the class's dtype
    model_fingerprint: str | None = None
    model_parts: Mapping[str, str] = field(default_factory=dict)
    proposer_fingerprint: str | None = None
    proposer: str | None = None
    stages: frozenset[Stage] = frozenset({Stage.VERIFY})

    @classmethod
    def of(cls, row: Any, stages: Iterable[Stage]) -> PinnedJob:
        """Of a job's row; its key is of the class that is pinned. What is read now is to be
        verified and recorded soon."""
        now = frozenset(stages)
        to_come = frozenset({Stage.VERIFY, Stage.RECORD} if Stage.INGEST in now else ())
        return cls(
            row.job_id,
            row.verifier,
            row.numeric_class,
            key_of_spec(row.spec, row.numeric_class),
            row.model_fingerprint,
            row.model_parts or {},
            row.proposer_fingerprint,
            row.proposer,
            now | to_come,
        )

    def waits(self, alive: Alive) -> str | None:
        """In words, what it lacks, and what there is instead; None: nothing."""
        lacking = [words for stage in WORK if (words := self._lacks(stage, alive))]
        return "; and it ".join(lacking) or None

    def lacking(self, alive: Alive) -> list[Stage]:
        """The stages at which it waits for a worker."""
        return [stage for stage in WORK if self._lacks(stage, alive)]

    def _lacks(self, stage: Stage, alive: Alive) -> str | None:
        """What it lacks at one stage. Nobody to record is said once: the same workers publish."""
        if stage not in self.stages:
            return None
        if stage is Stage.VERIFY:
            words = self.waits_to_verify(alive.verifying())
            return words and words + alive.troubled(stage, self.model)
        if stage is Stage.PUBLISH and Stage.RECORD in self.stages:
            return None
        if not alive.lacks(stage, self.proposer):
            return None
        does = _DOES[stage].format(model=self.proposer)
        return f"waits for a worker that {does}; alive: {alive.words()}"

    def waits_to_verify(self, workers: Iterable[WorkerNow]) -> str | None:
        """In words, what it lacks to be verified, and what of that kind these workers have; None:
        one of them may verify it."""
        told = [
            (one.owner, one.serves)
            for one in workers
            if one.serves is not None and one.serves.works_on(self.job_id)
        ]
        mine = [(owner, serves) for owner, serves in told if serves.model == self.model]
        if told and not mine:
            there = _joined(f"`{serves.model}`" for _, serves in told)
            return f"waits for a worker with model `{self.model}`; alive: {there}"
        same = [one for one in mine if one[1].has_model(self.model_fingerprint)]
        if mine and not same:
            return self._waits_for_model(mine)
        drafting = [s for _, s in same if self.proposer_fingerprint in (None, *s.drafts)]
        if same and not drafting:
            drafts = [shown(digest) for _, serves in same for digest in serves.drafts]
            there = _joined(drafts) if drafts else "none with a draft model (--proposer)"
            wanted = shown(self.proposer_fingerprint or "")
            return f"waits for a worker with draft model fingerprint {wanted}; alive: {there}"
        if self.numeric_class in (None, UNKNOWN):
            return (
                None if drafting else f"waits for a worker with model `{self.model}`; alive: none"
            )
        classes = {name for serves in drafting if (name := serves.class_of(self.key))}
        if self.numeric_class in classes:
            return None
        return (
            f"waits for a worker of numeric class {self.numeric_class}; alive: {_joined(classes)}"
        )

    def _waits_for_model(self, workers: Iterable[tuple[str, Serves]]) -> str:
        there = _joined(f"{owner} with {self._other(serves)}" for owner, serves in workers)
        wanted = shown(self.model_fingerprint or "")
        return f"waits for a worker with model fingerprint {wanted}; alive: {there}"

    def _other(self, serves: Serves) -> str:
        """What a worker has instead."""
        if serves.fingerprint is None:
            return "files that cannot be read"
        names = differing(self.model_parts, serves.fingerprint.parts)
        how = f" (other {listed(names)})" if names else ""
        return shown(serves.fingerprint.digest) + how


_DOES = {
    Stage.INGEST: "reads inputs (`specbatch worker ingest`, or `all`)",
    Stage.PROPOSE: "drafts with model `{model}` (its groups continue without drafts after a while)",
    Stage.RECORD: "records groups (`specbatch worker record`, or `all`)",
    Stage.PUBLISH: "publishes outputs (`specbatch worker record`, or `all`)",
}


def _joined(words: Iterable[str]) -> str:
    return ", ".join(sorted(set(words))) or "none"


@dataclass(frozen=True, slots=True)
class Backlog:
    """One look at the store."""

    at: float  # seconds since the epoch
    stages: tuple[StageBacklog, ...]  # one for each of `WORK`, in that order
    jobs: Mapping[JobState, int]  # those that are not over: QUEUED and RUNNING, zeros too
    rows_failed: int  # of these jobs: quarantined, or finished with an error
    workers: tuple[WorkerNow, ...]  # by owner
    pinned: tuple[PinnedJob, ...] = ()  # by id
    processes: tuple[ProcessNow, ...] = ()  # by owner

    def waiting(self, silence_sec: float = math.inf) -> dict[str, str]:
        """What jobs wait for, in words, by id: those that no live worker goes on with.

        Workers that were not heard of for longer than `silence_sec` are held for dead.
        """
        alive = self.alive(silence_sec)
        found = {job.job_id: job.waits(alive) for job in self.pinned}
        return {job_id: words for job_id, words in found.items() if words is not None}

    def alive(self, silence_sec: float) -> Alive:
        """Workers that were heard of since then."""
        return Alive(
            tuple(one for one in self.workers if one.silent_sec <= silence_sec),
            tuple(one for one in self.processes if one.silent_sec <= silence_sec),
        )

    def at_stage(self, stage: Stage) -> StageBacklog:
        return next((s for s in self.stages if s.stage is stage), StageBacklog(stage))


def is_interrupted(
    job: JobRow,
    holders: Callable[[str], Sequence[str]],
    workers: Iterable[WorkerNow],
    lease_sec: float,
) -> bool:
    """Whether a job was started, nobody holds any of it, and no live worker would take it up.

    A process that is killed tells nobody. `holders` names who holds unexpired leases of a job.
    `workers` are those that have not ended; one that was silent for a whole lease has lost what it
    held, so it counts as dead here.
    """
    if job.state is not JobState.RUNNING:
        return False
    alive = (worker for worker in workers if worker.silent_sec <= lease_sec)
    if any(one.serves is None or one.serves.works_on(job.job_id) for one in alive):
        return False
    return not holders(job.job_id)
