"""The store in memory: the twin of `SqlStore` for tests, small enough to be read as the rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from specbatch.pipeline.audit import accounts, entries
from specbatch.pipeline.audit.accounts import AccountRows
from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.memory.figures import FiguresInMemory
from specbatch.pipeline.ledger.memory.learning import LearningInMemory
from specbatch.pipeline.ledger.memory.privacy import PrivacyInMemory
from specbatch.pipeline.ledger.memory.reading import ReadingInMemory
from specbatch.pipeline.ledger.memory.serving import served
from specbatch.pipeline.ledger.memory.turns import TurnsInMemory
from specbatch.pipeline.ledger.memory.units import Group, Unit, new_job
from specbatch.schemas.audit import EntryKind, PublishedManifest
from specbatch.schemas.errors import StoreError
from specbatch.schemas.fingerprint import Models
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.masking import masked
from specbatch.schemas.numeric_class import Pinned, Serves
from specbatch.schemas.records import (
    Artefact,
    Beat,
    CompletionRecord,
    DueWork,
    GroupWork,
    JobRow,
    JobState,
    JobWork,
    Lease,
    NewGroup,
    NewJob,
    RejectedRow,
    Released,
    SourcePosition,
    Stage,
    StageTiming,
)
from specbatch.schemas.timekeeping import Spent


class MemoryStore(
    TurnsInMemory,
    FiguresInMemory,
    LearningInMemory,
    PrivacyInMemory,
    ReadingInMemory,
):
    """All of the contract under one lock. `clock` may be replaced by a test's own."""

    # --- jobs -------------------------------------------------------------------------------
    def create_job(self, job: NewJob) -> tuple[JobRow, bool]:
        with self._lock:
            for known in self._jobs.values():
                same_key = job.idempotency_key not in (None, "") and (
                    known.row.idempotency_key == job.idempotency_key
                )
                if same_key or known.row.job_id == job.job_id:
                    rules.check_same_job(known.row, job)
                    return self._row(known), False
            self._jobs[job.job_id] = made = new_job(job, self._now())
            self._say(made, EntryKind.SUBMITTED, entries.pinned(made.row))
            return made.row, True

    def get_job(self, job_id: str) -> JobRow:
        with self._lock:
            return self._row(self._job(job_id))

    def job_of_key(self, key: str) -> JobRow | None:
        with self._lock:
            found = (job for job in self._jobs.values() if job.row.idempotency_key == key)
            return next(map(self._row, found), None)

    def list_jobs(self, limit: int = 50, state: JobState | None = None) -> list[JobRow]:
        with self._lock:
            rows = [self._row(j) for j in self._jobs.values() if state in (None, j.row.state)]
            return sorted(rows, key=lambda r: (r.created_at, r.job_id), reverse=True)[:limit]

    def progress(self, job_id: str) -> JobProgress:
        with self._lock:
            return self._job(job_id).progress()

    def request_cancel(self, job_id: str, reason: str | None = None) -> JobRow:
        return self._cancel(job_id, reason, EntryKind.CANCELLED)

    def _cancel(self, job_id: str, reason: str | None, kind: EntryKind) -> JobRow:
        with self._lock:
            job, now = self._job(job_id), self._now()
            if job.row.state.is_final:
                return self._row(job)
            self._say(job, kind, {"reason": reason})
            job.update(cancel_requested=True, stop_reason=job.row.stop_reason or reason)
            for group in job.groups.values():
                if group.stage in rules.CANCELLABLE and group.lease_until <= now:
                    group.put_down(Stage.CANCELLED, now, group.last_error)
            if job.stage is Stage.INGEST and job.lease_until <= now:
                job.move(Stage.RUN, now)
            job.settle(now)
            return self._row(job)

    def fail_job(self, lease: Lease, error: str) -> None:
        with self._lock:
            self._fail(self._held_job(lease), masked(error), lease.owner)

    # --- leases -----------------------------------------------------------------------------
    def claim_job(self, job_id: str, stage: Stage, owner: str, lease_sec: float) -> JobWork | None:
        with self._lock:
            job, now = self._jobs.get(job_id), self._now()
            if job is None or job.stage is not stage or job.lease_until > now:
                return None
            if stage not in (Stage.INGEST, Stage.PUBLISH):
                return None
            if job.row.cancel_requested and stage is Stage.INGEST:
                job.move(Stage.RUN, now)
                job.settle(now)
                return None
            if stage is Stage.INGEST and job.waits:
                return None
            if job.attempts >= self._max_attempts:
                self._fail(job, rules.last_words(Stage.FAILED, job.attempts, job.last_error))
                return None
            job.claim(owner, now, lease_sec)
            if stage is Stage.INGEST:
                started = now if job.row.started_at is None else job.row.started_at
                job.update(state=JobState.RUNNING, started_at=started)
            lease = Lease(job_id, None, stage, job.generation, owner, job.attempts)
            return JobWork(lease, job.planned, job.next_row, job.cursor)

    def claim_group(
        self,
        job_id: str,
        index: int,
        stage: Stage,
        owner: str,
        lease_sec: float,
        serves: Serves | None = None,
    ) -> GroupWork | None:
        with self._lock:
            job, now = self._jobs.get(job_id), self._now()
            if job is not None and serves is not None and served(job, serves):
                self._pin(job, serves, owner, lease_sec)
            group = job.groups.get(index) if job else None
            if job is None or group is None or group.stage is not stage or group.lease_until > now:
                return None
            if stage not in rules.OPEN:
                return None
            if self._close(job, group, now):
                return None
            if not self._may_claim(group, owner, now) or not served(job, serves):
                return None
            group.waited_sec = now - max(group.ready_at, group.lease_until)
            group.claim(owner, now, lease_sec)
            group.cut_wanted = False
            return GroupWork(
                Lease(job_id, index, stage, group.generation, owner, group.attempts),
                group.new.rows,
                group.new.prompts,
                group.drafts,
                group.results,
                group.row_start,
                group.row_stop,
                rows_kept=group.rows_kept,
                prompt_tokens=group.new.prompt_tokens,
                suspect=group.is_suspect(group.attempts - 1, self._max_attempts),
                waited_sec=group.waited_sec,
                **(Pinned() if serves is None else Pinned.of(job.row))._asdict(),
            )

    def heartbeat(self, leases: Sequence[Lease], lease_sec: float) -> Beat:
        with self._lock:
            now, lost, cancelled, cut_wanted = self._now(), set(), set(), set()
            for lease in leases:
                unit = self._unit(lease)
                if unit is None or not unit.is_held_by(lease):
                    lost.add(lease)
                else:
                    unit.lease_until = now + lease_sec
                    if isinstance(unit, Group) and unit.cut_wanted:
                        cut_wanted.add(lease)
                job = self._jobs.get(lease.job_id)
                if job is not None and job.row.cancel_requested:
                    cancelled.add(lease.job_id)
            return Beat(lost, cancelled, cut_wanted)

    def release(
        self, lease: Lease, error: str, forgiven: bool = False, whole: bool = False
    ) -> Released:
        with self._lock:
            unit, now = self._unit(lease), self._now()
            if unit is None or not unit.is_held_by(lease):
                return Released(False)
            job, error = self._jobs[lease.job_id], masked(error)
            unit.attempts -= forgiven
            if isinstance(unit, Group):
                to = self._stage_without_lease(job, unit)
                if self._ends_in_halves(job, unit, to, whole):
                    return Released(True, self._in_halves(job, unit, now, error))
                unit.put_down(to, now, error)
                self._say_if_lost(job, unit, error, lease.owner)
            elif job.row.cancel_requested and job.stage is Stage.INGEST:
                job.move(Stage.RUN, now)
            elif job.attempts >= self._max_attempts:
                self._fail(job, error, lease.owner)
            else:
                job.put_down(job.stage, now, error)
            job.settle(now)
            return Released(True)

    def cancel_group(self, lease: Lease) -> None:
        with self._lock:
            group, now = self._held_group(lease), self._now()
            group.put_down(Stage.CANCELLED, now, group.last_error)
            self._jobs[lease.job_id].settle(now)

    def _held_of(self, job_id: str) -> list[Unit]:
        job = self._jobs.get(job_id)
        units: list[Unit] = [] if job is None else [job, *job.groups.values()]
        return [unit for unit in units if unit.lease_until > self._now()]

    def holders(self, job_id: str) -> list[str]:
        with self._lock:
            return sorted({str(unit.owner) for unit in self._held_of(job_id)})

    def expire_leases(self, job_id: str, owner: str) -> int:
        with self._lock:
            held = [unit for unit in self._held_of(job_id) if unit.owner == owner]
            for unit in held:
                unit.lease_until = self._now()
            return len(held)

    def due(self, limit: int = 256, job_id: str | None = None) -> list[DueWork]:
        with self._lock:
            now = self._now()
            jobs = [j for j in self._jobs.values() if j.stage in (Stage.INGEST, Stage.PUBLISH)]
            due_jobs = [
                (
                    (j.ready_at, j.row.job_id),
                    DueWork(j.row.job_id, j.stage, None, priority=j.row.priority),
                )
                for j in jobs
                if j.lease_until <= now and not j.waits
            ]
            due_groups = [
                ((g.ready_at, j.row.job_id, index), j.due_of(index))
                for j in self._jobs.values()
                for index, g in j.groups.items()
                if g.stage in rules.OPEN and g.lease_until <= now
            ]
            by_age = itemgetter(0)
            seen: Counter[tuple[Stage, str | None, int]] = Counter()
            found = []
            for _, work in [*sorted(due_jobs, key=by_age), *sorted(due_groups, key=by_age)]:
                kind = (work.stage, work.model, work.priority)
                if job_id in (None, work.job_id) and seen[kind] < limit:
                    seen[kind] += 1
                    found.append(work)
            return found

    def skip_proposals(self, patience_sec: float) -> list[tuple[str, int]]:
        with self._lock:
            now, skipped = self._now(), []
            for job in self._jobs.values():
                if job.gets_drafts(now, patience_sec):
                    continue
                for index, group in job.groups.items():
                    is_free = group.stage is Stage.PROPOSE and group.lease_until <= now
                    if is_free and max(group.ready_at, group.lease_until) < now - patience_sec:
                        group.put_down(Stage.VERIFY, now, group.last_error)
                        group.generation += 1
                        skipped.append((job.row.job_id, index))
            return sorted(skipped)

    # --- ingest -----------------------------------------------------------------------------
    def add_groups(
        self,
        lease: Lease,
        groups: Sequence[NewGroup],
        rejected: Sequence[RejectedRow],
        next_row: int,
        cursor: SourcePosition,
        from_row: int | None = None,
    ) -> None:
        with self._lock:
            job, now = self._held_job(lease), self._now()
            rules.check_order(lease.job_id, job.planned, groups)
            rules.check_place(lease, job.next_row, from_row)
            if any(row.row_index in job.rejected for row in rejected):
                raise StoreError(f"a row of job {lease.job_id} is in quarantine already")
            for g in groups:
                cancelled = job.row.cancel_requested
                job.groups[g.index] = Group(
                    Stage.CANCELLED if cancelled else g.first_stage, now, new=g
                )
            job.rejected |= {row.row_index: row for row in rejected}
            if groups or rejected:
                said = entries.planned(groups, rejected)
                self._say(job, EntryKind.PLANNED, said, lease.owner)
            job.planned += len(groups)
            job.next_row, job.cursor, job.attempts = next_row, cursor, 0
            job.update(
                groups_total=len(job.groups),
                prompt_tokens=sum(g.new.prompt_tokens for g in job.groups.values()),
            )

    def finish_ingest(
        self,
        lease: Lease,
        rows_total: int,
        models: Mapping[str, Any],
        from_row: int | None = None,
    ) -> None:
        with self._lock:
            job, now = self._held_job(lease), self._now()
            rules.check_place(lease, job.next_row, from_row)
            self._say(job, EntryKind.READ, entries.read(rows_total, models), lease.owner)
            job.ingest_done = True
            job.update(rows_total=rows_total, report={**job.row.report, **models})
            job.move(Stage.RUN, now)
            job.settle(now)

    def pin_models(self, lease: Lease, models: Models) -> None:
        with self._lock:
            job = self._held_job(lease)
            pinned = rules.models_to_pin(job.row, models)
            if pinned:
                self._say(job, EntryKind.PINNED, pinned, lease.owner)
                job.update(**pinned)

    def note_report(self, lease: Lease, values: Mapping[str, Any]) -> None:
        with self._lock:
            job = self._held_job(lease)
            job.update(report={**job.row.report, **values})

    # --- groups -----------------------------------------------------------------------------
    def advance(
        self,
        lease: Lease,
        to: Stage,
        artefact: Artefact | None,
        timing: StageTiming,
        spent: Spent | None = None,
    ) -> None:
        rules.check_step(lease.stage, to, artefact is not None)
        with self._lock:
            group = self._held_group(lease)
            self._keep_time(lease, spent)
            group.add(timing)
            if to is Stage.VERIFY:
                group.drafts = artefact
            else:
                group.results = artefact
            group.move(to, self._now())
            group.last_error = None

    def commit_group(
        self,
        lease: Lease,
        completions: Sequence[CompletionRecord],
        timing: StageTiming,
        report: Mapping[str, float],
    ) -> Stage | None:
        with self._lock:
            group, job, now = self._held_group(lease), self._jobs[lease.job_id], self._now()
            if lease.stage is not Stage.RECORD:
                raise rules.fenced(lease)
            self._record(job, lease, group.generation, EntryKind.GROUP, completions)
            group.add(timing)
            group.count(completions)
            if group.rows_kept:
                group.kept |= {record.row_index for record in completions}
            group.move(Stage.DONE, now)
            group.last_error = None
            job.update(report=rules.merge_report(job.row.report, report))
            was, waited = job.stage, job.waits
            job.settle(now)
            return rules.due_after(was, waited, job.stage, job.waits)

    # --- publish ----------------------------------------------------------------------------
    def finish_job(
        self,
        lease: Lease,
        state: JobState,
        error: str | None = None,
        manifest: PublishedManifest | None = None,
    ) -> None:
        rules.check_final(state)
        with self._lock:
            job = self._held_job(lease)
            if lease.stage is not Stage.PUBLISH:
                raise rules.fenced(lease)
            error = error and masked(error)
            pinned = accounts.pinned(self.accounts(lease.job_id))
            said = entries.ended(state.value, error, manifest, pinned)
            self._say(job, EntryKind.PUBLISHED, said, lease.owner)
            job.end(state, error, self._now())

    def accounts(self, job_id: str) -> AccountRows:
        with self._lock:
            job = self._job(job_id)
            return AccountRows(
                job={
                    "groups_total": job.planned,
                    "groups_cut": job.row.groups_total - job.planned,
                    "rows_rejected": len(job.rejected),
                    "prompt_tokens": job.row.prompt_tokens,
                    "next_row": job.next_row,
                    "report": dict(job.row.report),
                },
                groups=[
                    (index, *(group.figure(name) for name in accounts.OF_GROUP))
                    for index, group in sorted(job.groups.items())
                ],
                slices=list(self.time_slices(job_id)),
                sessions=self.sessions(job_id),
                decisions=self._numbered_decisions(job_id),
            )

    def close(self) -> None:
        """Nothing to close."""
