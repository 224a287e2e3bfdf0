"""Turns and limits of `MemoryStore`: who is next, what ends a job early, and when reading waits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from specbatch.pipeline.audit import entries
from specbatch.pipeline.ledger import rules, turns
from specbatch.pipeline.ledger.memory.cutting import CuttingInMemory
from specbatch.pipeline.ledger.memory.serving import served
from specbatch.pipeline.ledger.memory.units import Group, Job
from specbatch.pipeline.ledger.turns import Waiting
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.fingerprint import Models
from specbatch.schemas.numeric_class import Change, Serves
from specbatch.schemas.records import (
    CompletionRecord,
    GroupWork,
    JobRow,
    JobState,
    Lease,
    Stage,
    StageTiming,
)
from specbatch.schemas.timekeeping import Spent


class TurnsInMemory(CuttingInMemory):
    """Between the jobs and the rest of the store, which claims and cancels."""

    @abstractmethod
    def claim_group(
        self,
        job_id: str,
        index: int,
        stage: Stage,
        owner: str,
        lease_sec: float,
        serves: Serves | None = None,
    ) -> GroupWork | None: ...

    @abstractmethod
    def _cancel(self, job_id: str, reason: str | None, kind: EntryKind) -> JobRow: ...

    # --- turns ------------------------------------------------------------------------------
    def claim_next(
        self,
        stage: Stage,
        model: str,
        owner: str,
        lease_sec: float,
        serves: Serves | None = None,
    ) -> GroupWork | None:
        if stage not in rules.CANCELLABLE:
            return None
        with self._lock:
            waiting = self._waiting(stage, model, owner, serves)
            for job in turns.by_turn(waiting):
                if serves is not None and job.numeric_class is None:
                    self._pin(self._jobs[job.job_id], serves, owner, lease_sec)
                    return self.claim_next(stage, model, owner, lease_sec, serves)
                groups = self._claimable(self._jobs[job.job_id], stage, owner)
                index = min(groups, key=lambda i: (-groups[i].new.prompt_tokens, i))
                work = self.claim_group(job.job_id, index, stage, owner, lease_sec, serves)
                if work is not None:
                    weight = self._weights.get(job.tenant, turns.DEFAULT_WEIGHT)
                    cost = turns.cost_of(work.rows, work.prompt_tokens, job.tokens_per_row, weight)
                    start = max(job.served, turns.floor_of(job, waiting))
                    self._tenants[job.tenant] = (start + cost, start)
                    return work
            return None

    def close_over(self, limit: int = 1000) -> int:
        with self._lock:
            now = self._now()
            over = [
                (job, group)
                for _, job in sorted(self._jobs.items())
                for _, group in sorted(job.groups.items())
                if group.stage in rules.OPEN
                and group.lease_until <= now
                and self._stage_without_lease(job, group) is not group.stage
            ][:limit]
            for job, group in over:
                self._close(job, group, now)
            return len(over)

    def _waiting(
        self, stage: Stage, model: str, owner: str, serves: Serves | None
    ) -> list[Waiting]:
        """All live jobs of the model, and of a class that is served, with open groups there."""
        waiting = []
        for job in self._jobs.values():
            row = job.row
            named = row.verifier if stage is Stage.VERIFY else row.proposer
            is_live = job.stage in (Stage.INGEST, Stage.RUN) and not row.cancel_requested
            if named != model or not is_live or not served(job, serves):
                continue
            if any(group.stage is stage for group in job.groups.values()):
                has_had, started = self._tenants.get(row.tenant, (0.0, 0.0))
                sampling = row.spec.get("sampling") or {}
                per_row = turns.tokens_per_row(sampling.get("max_tokens"), sampling.get("n"))
                waiting.append(
                    Waiting(
                        row.job_id,
                        row.tenant,
                        row.priority,
                        row.created_at,
                        bool(self._claimable(job, stage, owner)),
                        has_had,
                        started,
                        per_row,
                        row.numeric_class,
                    )
                )
        return waiting

    def _claimable(self, job: Job, stage: Stage, owner: str) -> dict[int, Group]:
        now = self._now()
        return {
            index: group
            for index, group in job.groups.items()
            if group.stage is stage
            and group.lease_until <= now
            and group.attempts < self._max_attempts
            and self._may_claim(group, owner, now)
        }

    # --- stopping ---------------------------------------------------------------------------
    def stop_overdue(self) -> set[str]:
        with self._lock:
            return self._stop(list(self._jobs))

    def look(self, spent_usd: Mapping[Lease, float]) -> set[str]:
        with self._lock:
            for lease, usd in spent_usd.items():
                unit = self._unit(lease)
                if isinstance(unit, Group) and unit.is_held_by(lease):
                    unit.in_flight_usd = usd
            asked = {lease.job_id for lease in spent_usd} & set(self._jobs)
            self._stop(sorted(asked))
            return {job_id for job_id in asked if self._jobs[job_id].row.cancel_requested}

    def _stop(self, job_ids: Sequence[str]) -> set[str]:
        now, stopped = self._now(), set()
        for job_id in job_ids:
            job = self._jobs[job_id]
            row = job.row
            if job.stage not in (Stage.INGEST, Stage.RUN) or row.cancel_requested:
                continue
            late = row.deadline_at is not None and row.deadline_at <= now
            spent = sum(
                g.device_usd + (g.in_flight_usd if g.lease_until > now else 0.0)
                for g in job.groups.values()
            )
            reason = turns.reason_to_stop(late, row.deadline_at, spent, row.budget_usd)
            if reason is not None:
                self._cancel(job_id, reason, EntryKind.STOPPED)
                stopped.add(job_id)
        return stopped

    def retry_job(
        self,
        job_id: str,
        quarantined: bool = False,
        numeric_class: str | None = None,
        models: Models | None = None,
    ) -> int:
        with self._lock:
            job, now = self._job(job_id), self._now()
            change = Change(numeric_class, models)
            if change.is_any and not job.row.state.is_final:
                return self._move(job, change, quarantined)
            rules.check_retry(job.row, quarantined, job.ingest_done, change)
            closed = [g for g in job.groups.values() if g.stage in (Stage.FAILED, Stage.CANCELLED)]
            if quarantined:
                closed = [g for g in closed if g.stage is Stage.FAILED and g.new.rows == 1]
            for g in closed:
                to = rules.stage_after_retry(
                    g.new.first_stage, g.drafts is not None, g.results is not None
                )
                g.move(to, now)
                g.last_error = None
            unpublished = not quarantined and (
                job.row.state in (JobState.FAILED, JobState.CANCELLED)
            )
            returns = len(closed) + (not job.ingest_done or (unpublished and not closed))
            if returns:
                job.move(Stage.RUN if job.ingest_done else Stage.INGEST, now)
                late = job.row.deadline_at is not None and job.row.deadline_at <= now
                spent = turns.budget_was_spent(job.row.stop_reason)
                job.update(
                    state=JobState.RUNNING,
                    cancel_requested=False,
                    error=None,
                    finished_at=None,
                    stop_reason=None,
                    deadline_at=None if late else job.row.deadline_at,
                    budget_usd=None if spent else job.row.budget_usd,
                    **(pinned := rules.columns_of(job.row, change)),
                )
                row = job.row
                limits = (row.deadline_at, row.budget_usd)
                said = entries.retried(quarantined, returns, *limits, moved=pinned)
                self._say(job, EntryKind.RETRIED, said)
                job.settle(now)
            return returns

    def keep_part(
        self,
        lease: Lease,
        completions: Sequence[CompletionRecord],
        timing: StageTiming,
        report: Mapping[str, float],
        spent: Spent | None = None,
    ) -> None:
        with self._lock:
            group, job, now = self._held_group(lease), self._jobs[lease.job_id], self._now()
            self._keep_time(lease, spent)
            self._record(job, lease, group.generation, EntryKind.KEPT, completions)
            group.add(timing)
            group.count(completions)
            group.rows_kept += len({record.row_index for record in completions})
            group.kept |= {record.row_index for record in completions}
            group.put_down(Stage.CANCELLED, now, None)
            job.update(report=rules.merge_report(job.row.report, report))
            job.settle(now)

    def kept_rows(self, job_id: str, index: int | None = None) -> set[int]:
        with self._lock:
            job = self._jobs.get(job_id)
            groups = job.groups if job else {}
            kept = [g.kept for i, g in groups.items() if index in (None, i)]
            return set().union(*kept)

    # --- when reading waits -----------------------------------------------------------------
    def pause_ingest(self, lease: Lease, most_open: int) -> int:
        with self._lock:
            job, now = self._held_job(lease), self._now()
            room = most_open - job.open_groups
            if room > 0 or job.row.cancel_requested:
                return max(room, 1)
            job.move(lease.stage, now)
            job.resumes_at = rules.resumes_at(most_open)
            return 0
