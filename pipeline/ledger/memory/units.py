"""What `MemoryStore` holds: jobs and groups with their leases, and the moves they can make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specbatch.pipeline.ledger import cut_rules, rules
from specbatch.schemas.audit import LogEntry
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.mapper import whole_spec
from specbatch.schemas.records import (
    Artefact,
    CompletionRecord,
    DueWork,
    JobRow,
    JobState,
    Lease,
    NewGroup,
    NewJob,
    Prompts,
    RejectedRow,
    SourcePosition,
    Stage,
    StageTiming,
)


@dataclass
class Unit:
    """What can be claimed."""

    stage: Stage
    ready_at: float
    generation: int = 0
    owner: str | None = None
    lease_until: float = 0.0  # 0: nobody holds it
    attempts: int = 0
    last_error: str | None = None

    def claim(self, owner: str, now: float, lease_sec: float) -> None:
        self.generation += 1
        self.attempts += 1
        self.owner, self.lease_until = owner, now + lease_sec

    def move(self, to: Stage, now: float) -> None:
        """To another stage: nobody's, ready now, with all attempts again."""
        self.stage, self.ready_at, self.attempts = to, now, 0
        self.owner, self.lease_until = None, 0.0

    def put_down(self, stage: Stage, now: float, error: str | None) -> None:
        """Without its holder at `stage`, which may be the one it has: then attempts count on."""
        attempts = self.attempts if stage is self.stage else 0
        self.move(stage, now)
        self.attempts, self.last_error = attempts, error

    def is_held_by(self, lease: Lease) -> bool:
        return (self.generation, self.owner, self.stage) == (
            lease.generation,
            lease.owner,
            lease.stage,
        )


@dataclass
class Group(Unit):
    new: NewGroup = field(kw_only=True)
    drafts: Artefact | None = None
    results: Artefact | None = None
    waited_sec: float = 0.0
    queue_sec: float = 0.0
    compute_sec: float = 0.0
    device_usd: float = 0.0
    in_flight_usd: float = 0.0  # of who holds it, so far
    rows_kept: int = 0  # finished when its job was stopped: so many ...
    kept: set[int] = field(default_factory=set)  # ... and which
    totals: Mapping[str, Any] = field(default_factory=lambda: rules.group_totals([]))
    row_start: int = 0
    row_stop: int | None = None  # None: it was not cut
    cut_wanted: bool = False

    def claim(self, owner: str, now: float, lease_sec: float) -> None:
        Unit.claim(self, owner, now, lease_sec)
        self.in_flight_usd = 0.0

    @property
    def prompts(self) -> Prompts:
        return Prompts(self.new.prompts, self.row_start, self.new.rows)

    def is_suspect(self, attempts: int, max_attempts: int) -> bool:
        failed_part = self.row_stop is not None and self.last_error is not None
        return cut_rules.is_suspect(attempts, self.new.rows, failed_part, max_attempts)

    def add(self, timing: StageTiming) -> None:
        self.queue_sec += timing.queue_sec or self.waited_sec
        self.compute_sec += timing.compute_sec
        self.device_usd += timing.device_usd

    def figure(self, name: str) -> Any:
        """A column of the group's row."""
        if name in ("rows", "prompt_tokens"):
            return getattr(self.new, name)
        return self.totals[name] if name in self.totals else getattr(self, name)

    def count(self, completions: Sequence[CompletionRecord]) -> None:
        """Add to the totals: some may have been kept when the job was stopped."""
        added = rules.group_totals(completions)
        self.totals = {name: self.totals[name] + added[name] for name in added}


@dataclass
class Job(Unit):
    row: JobRow = field(kw_only=True)
    planned: int = 0  # groups; those that were cut off are `row.groups_total` minus these
    next_row: int = 0
    cursor: SourcePosition | None = None
    ingest_done: bool = False
    purged_to: int | None = None  # row up to which it is emptied; None: not at it
    resumes_at: int | None = None  # open groups with which a paused ingest goes on
    groups: dict[int, Group] = field(default_factory=dict)
    rejected: dict[int, RejectedRow] = field(default_factory=dict)
    completions: dict[tuple[int, int], CompletionRecord] = field(default_factory=dict)
    digests: dict[tuple[int, int], tuple[int, bytes]] = field(default_factory=dict)  # group, digest
    log: list[LogEntry] = field(default_factory=list)

    def update(self, **values: Any) -> None:
        self.row = replace(self.row, **values)

    @property
    def open_groups(self) -> int:
        return sum(g.stage in rules.OPEN for g in self.groups.values())

    @property
    def waits(self) -> bool:
        """Whether its input waits until fewer groups are open."""
        return self.resumes_at is not None

    def move(self, to: Stage, now: float) -> None:
        Unit.move(self, to, now)
        self.resumes_at = self.last_error = None

    def settle(self, now: float) -> None:
        if self.stage is Stage.RUN and not self.open_groups:
            self.move(Stage.PUBLISH, now)
        if self.resumes_at is not None and self.open_groups <= self.resumes_at:
            self.resumes_at = None

    def gets_drafts(self, now: float, patience_sec: float) -> bool:
        """Whether some proposer works on it, or a drafted group got on lately."""
        return any(
            group.lease_until > now
            if group.stage is Stage.PROPOSE
            else group.ready_at > now - patience_sec
            for group in self.groups.values()
            if group.new.first_stage is Stage.PROPOSE
        )

    def end(self, state: JobState, error: str | None, now: float) -> None:
        for group in self.groups.values():
            if group.stage in rules.OPEN:
                group.put_down(Stage.CANCELLED, now, group.last_error or rules.JOB_ENDED)
        self.move(Stage.END, now)
        self.update(state=state, error=error, finished_at=now)

    def progress(self) -> JobProgress:
        groups = list(self.groups.values())
        finished = [g for g in groups if g.stage in (Stage.DONE, Stage.FAILED)]
        failed = [g for g in groups if g.stage is Stage.FAILED]

        def total(name: str) -> Any:
            return sum(g.totals[name] for g in groups)

        return JobProgress(
            job_id=self.row.job_id,
            state=self.row.state,
            rows_total=self.row.rows_total if self.ingest_done else self.next_row,
            rows_done=len(self.rejected)
            + sum(g.new.rows for g in finished)
            + sum(g.rows_kept for g in groups if g.stage is Stage.CANCELLED),
            rows_failed=len(self.rejected) + total("rows_failed") + sum(g.new.rows for g in failed),
            groups_total=self.row.groups_total,
            groups_done=len(finished),
            completions=total("completions"),
            prompt_tokens=self.row.prompt_tokens,
            completion_tokens=total("completion_tokens"),
            proposed=total("proposed"),
            accepted=total("accepted"),
            verifier_passes=total("verifier_passes"),
            queue_sec=sum(g.queue_sec for g in groups),
            compute_sec=sum(g.compute_sec for g in groups),
            cost_usd=float(total("cost_usd")),
            ingest_done=self.ingest_done,
        )

    def due_of(self, index: int) -> DueWork:
        stage = self.groups[index].stage
        model = {Stage.PROPOSE: self.row.proposer, Stage.VERIFY: self.row.verifier}.get(stage)
        return DueWork(self.row.job_id, stage, index, model, self.row.priority)


def new_job(job: NewJob, now: float) -> Job:
    """A job that was just submitted."""
    row = JobRow(
        job_id=job.job_id,
        name=job.name,
        tenant=job.tenant,
        spec=dict(whole_spec(job.spec, job.sealed_spec)),
        spec_digest=job.spec_digest,
        state=JobState.QUEUED,
        stage=Stage.INGEST,
        verifier=job.verifier,
        proposer=job.proposer,
        output_uri=job.output_uri,
        workspace_uri=job.workspace_uri,
        idempotency_key=job.idempotency_key or None,
        cancel_requested=False,
        error=None,
        rows_total=0,
        groups_total=0,
        prompt_tokens=0,
        created_at=now,
        started_at=None,
        finished_at=None,
        priority=job.priority,
        deadline_at=None if job.deadline_sec is None else now + job.deadline_sec,
        budget_usd=job.budget_usd,
        privacy=job.privacy,
        numeric_class=job.numeric_class,
        model_fingerprint=job.model_fingerprint,
    )
    return Job(Stage.INGEST, now, row=row)
