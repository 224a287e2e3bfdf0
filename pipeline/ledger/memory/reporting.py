"""What reports and `top` read of `MemoryStore`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.memory.time import Session, TimeInMemory
from specbatch.pipeline.ledger.memory.units import Group, Job, Unit
from specbatch.schemas.backlog import WORK, Backlog, PinnedJob, StageBacklog, WorkerNow
from specbatch.schemas.job_figures import GroupFigures, RowFigures
from specbatch.schemas.records import CompletionRecord, JobState, Stage


class ReportingInMemory(TimeInMemory):
    """Under the store's lock."""

    def backlog(self) -> Backlog:
        with self._lock:
            now = self._now()
            live = [job for job in self._jobs.values() if not job.row.state.is_final]
            groups = [g for job in live for g in job.groups.values() if g.stage in rules.OPEN]
            due = [job for job in live if job.stage in (Stage.INGEST, Stage.PUBLISH)]
            units: list[Unit] = [*groups, *(job for job in due if not job.waits)]
            states = Counter(job.row.state for job in live)
            held = Counter(group.owner for group in groups if group.lease_until > now)
            open_sessions = [s for s in self._sessions.values() if s.row.ended_at is None]
            return Backlog(
                at=now,
                stages=tuple(_at_stage(stage, units, now) for stage in WORK),
                jobs={state: states[state] for state in (JobState.QUEUED, JobState.RUNNING)},
                rows_failed=sum(job.progress().rows_failed for job in live),
                workers=tuple(
                    sorted(
                        (_worker(s, held[s.row.owner], now) for s in open_sessions),
                        key=lambda worker: (worker.owner, worker.session_id),
                    )
                ),
                pinned=tuple(
                    PinnedJob.of(job.row, _stages(job))
                    for job in sorted(live, key=_id)
                    if not job.row.cancel_requested
                ),
                processes=tuple(self._processes_now(now)),
            )

    def group_figures(self, job_id: str) -> Iterator[GroupFigures]:
        with self._lock:
            job = self._jobs.get(job_id)
            groups = sorted(job.groups.items()) if job else []
            return iter([_of_group(index, group) for index, group in groups])

    def row_figures(
        self,
        job_id: str,
        batch: int = 1000,  # noqa: ARG002 - nothing to page
    ) -> Iterator[RowFigures]:
        with self._lock:
            job = self._jobs.get(job_id)
            records = sorted(job.completions.items()) if job else []
            return iter([_of_row(job.digests[key][0], c) for key, c in records] if job else [])


def _id(job: Job) -> str:
    return job.row.job_id


def _stages(job: Job) -> set[Stage]:
    """Those at which it has something to be done."""
    of_groups = {group.stage for group in job.groups.values() if group.stage in rules.OPEN}
    is_due = job.stage in (Stage.INGEST, Stage.PUBLISH) and not job.waits
    return of_groups | ({job.stage} if is_due else set())


def _of_group(index: int, group: Group) -> GroupFigures:
    totals = group.totals
    return GroupFigures(
        index=index,
        stage=group.stage,
        rows=group.new.rows,
        done_at=group.ready_at if group.stage is Stage.DONE else None,
        queue_sec=group.queue_sec,
        compute_sec=group.compute_sec,
        completions=totals["completions"],
        completion_tokens=totals["completion_tokens"],
        proposed=totals["proposed"],
        accepted=totals["accepted"],
        verifier_passes=totals["verifier_passes"],
        cost_usd=totals["cost_usd"],
    )


def _of_row(group_index: int, c: CompletionRecord) -> RowFigures:
    passes = c.provenance
    return RowFigures(
        c.row_index,
        c.sample_index,
        group_index,
        c.tag,
        c.finish_reason,
        c.prompt_tokens,
        c.proposed,
        c.accepted,
        c.verifier_passes,
        c.cost_usd,
        c.ticks.total,
        c.origins,
        passes.steps,
        passes.sources,
        passes.makers or (0,) * len(passes.drafted),
        passes.drafted,
    )


def _at_stage(stage: Stage, units: list[Unit], now: float) -> StageBacklog:
    there = [unit for unit in units if unit.stage is stage]
    ready = [unit for unit in there if unit.lease_until <= now]
    since = min((max(unit.ready_at, unit.lease_until) for unit in ready), default=None)
    return StageBacklog(
        stage,
        len(ready),
        len(there) - len(ready),
        sum(unit.lease_until > 0 for unit in ready),
        None if since is None else max(0.0, now - since),
    )


def _worker(session: Session, leases: int, now: float) -> WorkerNow:
    row = session.row
    return WorkerNow(
        row.session_id,
        row.owner,
        row.device,
        now - row.started_at,
        now - session.beat_at,
        row.seen,
        row.idle,
        row.overhead,
        leases,
        row.serves,
    )
