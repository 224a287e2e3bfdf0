"""Waiting work and live workers of the whole store at one moment, by the store's clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specbatch.schemas.budgets import Shortfall
from specbatch.schemas.fingerprint import differing, listed, shown
from specbatch.schemas.numeric_class import UNKNOWN, Serves, key_of_spec
from specbatch.schemas.placement import ANYWHERE, SPOT, PlacementSpec, Site
from specbatch.schemas.presence import ProcessNow, alive_words
from specbatch.schemas.provenance import TICKS_PER_SEC
from specbatch.schemas.records import CLAIMABLE, JobRow, JobState, Stage
from specbatch.schemas.timekeeping import Device


@dataclass(frozen=True, slots=True)
class StageBacklog:
    """Units at one stage, without paused inputs, which nobody may claim."""

    stage: Stage
    ready: int = 0  # any worker may claim them
    leased: int = 0  # a worker holds them
    expired: int = 0  # of the ready ones: their lease expired, and no worker took over
    oldest_ready_sec: float | None = None  # how long the oldest ready one has waited


@dataclass(frozen=True, slots=True)
class WorkerNow:
    """A device of a worker process that has not ended as far as the store knows."""

    session_id: str
    owner: str
    device: Device
    age_sec: float  # since its beginning
    silent_sec: float  # since its last heartbeat
    seen: int  # 100-ns units from its start to its last heartbeat
    idle: int  # of these: it held no work
    overhead: int  # of these: it held some, and no step of an engine ran
    leases: int = 0  # groups that its process holds
    serves: Serves | None = None  # what it verifies with; None: it verifies nothing

    @property
    def site(self) -> Site:
        return Site(self.device.region, self.device.tenure == SPOT)

    @property
    def busy_ticks(self) -> int:
        """How much of `seen` engine steps took."""
        return max(0, self.seen - self.idle - self.overhead)

    @property
    def usd(self) -> float:
        """Its cost so far."""
        return self.seen / TICKS_PER_SEC / 3600 * self.device.price_microusd / 1e6


@dataclass(frozen=True, slots=True)
class Alive:
    """Workers that sent a heartbeat lately."""

    workers: tuple[WorkerNow, ...] = ()
    processes: tuple[ProcessNow, ...] = ()
    at: float = 0.0  # seconds since the epoch, by the store's clock

    def verifying(self) -> list[WorkerNow]:
        """Workers that may verify, without those whose process cannot take messages."""
        deaf = {one.process.owner for one in self.processes if one.trouble is not None}
        return [one for one in self.workers if one.owner not in deaf]

    def allowed(self, placement: PlacementSpec) -> Alive:
        """Those that may have the rows of such a job. Processes of earlier releases do not tell
        where they are: they count as allowed."""
        workers = tuple(one for one in self.workers if placement.allows(one.site))
        processes = tuple(
            one
            for one in self.processes
            if one.process.site is None or placement.allows(one.process.site)
        )
        return replace(self, workers=workers, processes=processes)

    def lacks(self, stage: Stage, model: str | None = None) -> bool:
        """Whether no worker takes messages for units at this stage.

        Workers of earlier releases report their sessions alone. While one is alive the answer is
        no, because nobody knows what it does.
        """
        known = {one.process.owner for one in self.processes}
        if any(one.owner not in known for one in self.workers):
            return False
        return not any(one.does(stage, model) and one.trouble is None for one in self.processes)

    def sites(self, stage: Stage) -> str:
        """Where workers of this stage are, in words."""
        of_processes = [one.process.site for one in self.processes if one.does_kind(stage)]
        sites = [site for site in of_processes if site is not None] or [
            one.site for one in self.workers
        ]
        return _joined(f"{site.region}{' on spot' if site.is_spot else ''}" for site in sites)

    def troubled(self, stage: Stage, model: str | None = None) -> str:
        """Workers of this stage that cannot take messages, as the end of a sentence."""
        owners = [
            one.process.owner for one in self.processes if one.trouble and one.does(stage, model)
        ]
        return f"; {_joined(owners)} can take no messages from the broker" if owners else ""


@dataclass(frozen=True, slots=True)
class PinnedJob:
    """A live job, what it has pinned, and the stages at which it has work to do."""

    job_id: str
    model: str
    numeric_class: str | None
    key: str  # how it asks for its engine, in the class's dtype
    model_fingerprint: str | None = None
    model_parts: Mapping[str, str] = field(default_factory=dict)
    proposer_fingerprint: str | None = None
    proposer: str | None = None
    stages: frozenset[Stage] = frozenset({Stage.VERIFY})
    placement: PlacementSpec = ANYWHERE

    @classmethod
    def of(cls, row: Any, stages: Iterable[Stage]) -> PinnedJob:
        """Make one from a job's row; its key is that of the pinned class.

        A job that is being read will soon have groups to verify and record.
        """
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
            PlacementSpec.model_validate(row.spec.get("placement") or {}),
        )

    def waits(self, alive: Alive) -> str | None:
        """Says which workers the job lacks and which are alive; None if it lacks none."""
        lacking = [words for stage in CLAIMABLE if (words := self._lacks_placed(stage, alive))]
        return "; and it ".join(lacking) or None

    def lacking(self, alive: Alive) -> list[Stage]:
        """The stages at which the job waits for a worker."""
        return [stage for stage in CLAIMABLE if self._lacks_placed(stage, alive)]

    def _lacks_placed(self, stage: Stage, alive: Alive) -> str | None:
        """What the job lacks at one stage, where its rows may be."""
        if self.placement == ANYWHERE:
            return self._lacks(stage, alive)
        words = self._lacks(stage, alive.allowed(self.placement))
        if words is None:
            return None
        if self._lacks(stage, alive) is None:  # others could do it
            wanted = f"waits for a worker {self.placement.words} {_AT[stage]}"
            return f"{wanted}; alive: {alive.sites(stage)}"
        return f"{words} (only workers {self.placement.words} count)"

    def _lacks(self, stage: Stage, alive: Alive) -> str | None:
        """What the job lacks at one stage. The same workers record and publish: say it once."""
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
        return f"waits for a worker that {does}; alive: {alive_words(alive.processes)}"

    def may_be_verified_by(self, worker: WorkerNow) -> bool:
        return self.placement.allows(worker.site) and self.waits_to_verify([worker]) is None

    def waits_to_verify(self, workers: Iterable[WorkerNow]) -> str | None:
        """Says what the job lacks to be verified, and what these workers have.

        None if one of them may verify it.
        """
        offers = [
            (one.owner, one.serves)
            for one in workers
            if one.serves is not None and one.serves.works_on(self.job_id)
        ]
        mine = [(owner, serves) for owner, serves in offers if serves.model == self.model]
        if offers and not mine:
            there = _joined(f"`{serves.model}`" for _, serves in offers)
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
            if not drafting:
                return f"waits for a worker with model `{self.model}`; alive: none"
            if self.numeric_class == UNKNOWN or any(s.class_of(self.key) for s in drafting):
                return None
            keys = _joined(key for serves in drafting for key, _ in serves.classes)
            own = ", vLLM's own speculation" if self.key.count("/") > 2 else ""
            wanted = f"runs {self.key} (dtype, exactness, weights{own})"
            return f"waits for a worker that {wanted}; alive: {keys}"
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
        """What a worker has, in words."""
        if serves.fingerprint is None:
            return "files that cannot be read"
        names = differing(self.model_parts, serves.fingerprint.parts)
        how = f" (other {listed(names)})" if names else ""
        return shown(serves.fingerprint.digest) + how


_AT = {
    Stage.INGEST: "to read its input",
    Stage.PROPOSE: "to draft",
    Stage.VERIFY: "to verify",
    Stage.RECORD: "to record",
    Stage.PUBLISH: "to publish",
}
_DOES = {
    Stage.INGEST: "reads inputs (`specbatch worker ingest`, or `all`)",
    Stage.PROPOSE: "drafts with model `{model}` (its groups continue without drafts after a while)",
    Stage.RECORD: "records groups (`specbatch worker record`, or `all`)",
    Stage.PUBLISH: "publishes outputs (`specbatch worker record`, or `all`)",
}


def _joined(words: Iterable[str]) -> str:
    return ", ".join(sorted(set(words))) or "none"


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A live job that has groups to propose or to verify, for placement by price."""

    pinned: PinnedJob
    tenant: str
    priority: int  # 0 goes first
    created_at: float  # seconds since the epoch
    deadline_at: float | None
    rows: int  # to propose or to verify
    is_read: bool  # whether these are all that there will be
    sec_per_row: float | None  # device seconds; None: nothing is known yet
    group_rows: int  # of its largest group
    moved_at: float  # when one of its groups last became ready for a stage, or ended


@dataclass(frozen=True, slots=True)
class Backlog:
    """The state of the store at one moment."""

    at: float  # seconds since the epoch
    stages: tuple[StageBacklog, ...]  # one for each of `CLAIMABLE`, in that order
    jobs: Mapping[JobState, int]  # those that are not over: QUEUED and RUNNING, zeros too
    rows_failed: int  # of these jobs: quarantined, or finished with an error
    workers: tuple[WorkerNow, ...]  # by owner
    pinned: tuple[PinnedJob, ...] = ()  # by id
    processes: tuple[ProcessNow, ...] = ()  # by owner
    over_budget: tuple[Shortfall, ...] = ()  # by job id

    def waiting(self, silence_sec: float = math.inf) -> dict[str, str]:
        """Says, by id, what jobs wait for that no live worker can continue, or none may.

        Workers count as dead after `silence_sec` without a heartbeat.
        """
        alive = self.alive(silence_sec)
        found = {job.job_id: job.waits(alive) for job in self.pinned}
        said = {job_id: words for job_id, words in found.items() if words is not None}
        for one in self.over_budget:
            first = f"{said[one.job_id]}; and it " if one.job_id in said else ""
            said[one.job_id] = first + one.words
        return said

    def lacking(self, silence_sec: float) -> set[tuple[str, Stage]]:
        """The jobs that no live worker can continue at a stage, or none may verify."""
        alive = self.alive(silence_sec)
        found = {(job.job_id, stage) for job in self.pinned for stage in job.lacking(alive)}
        return found | {(one.job_id, Stage.VERIFY) for one in self.over_budget}

    def alive(self, silence_sec: float) -> Alive:
        """Workers with a heartbeat since then."""
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
