"""Cutting groups in two in `MemoryStore`: the twin of `cutting.py`."""

from __future__ import annotations

from dataclasses import replace

from specbatch.pipeline.audit import entries
from specbatch.pipeline.ledger import cut_rules, rules
from specbatch.pipeline.ledger.memory.serving import ServingInMemory, served
from specbatch.pipeline.ledger.memory.units import Group, Job
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.records import Lease, Stage


class CuttingInMemory(ServingInMemory):
    """What the store does to groups that are cut."""

    def cut_group(self, lease: Lease, keep: int) -> int:
        with self._lock:
            group, now = self._held_group(lease), self._now()
            if lease.stage is not Stage.VERIFY:
                raise rules.fenced(lease)
            return self._cut(self._jobs[lease.job_id], group, keep, now)

    def want_cut(
        self, model: str, owner: str, serves: Serves | None = None
    ) -> tuple[str, int] | None:
        with self._lock:
            now = self._now()
            jobs = [
                job
                for job in self._jobs.values()
                if job.row.verifier == model and served(job, serves)
            ]
            if any(
                group.stage is Stage.VERIFY and group.lease_until <= now
                for job in jobs
                for group in job.groups.values()
            ):
                return None
            candidates = [
                (-group.new.rows, -(group.ready_at + group.waited_sec), job.row.job_id, index)
                for job in jobs
                if job.stage is Stage.RUN and not job.row.cancel_requested
                if all(group.stage is not Stage.PROPOSE for group in job.groups.values())
                for index, group in job.groups.items()
                if group.stage is Stage.VERIFY and group.owner != owner
                if group.new.rows > 1 and not group.cut_wanted
            ]
            if not candidates:
                return None
            *_, job_id, index = min(candidates)
            self._jobs[job_id].groups[index].cut_wanted = True
            return job_id, index

    def _close(self, job: Job, group: Group, now: float) -> bool:
        """Send a free group on that nobody may claim any more; True when that is done.

        One that is cut in halves instead stays where it is.
        """
        to = self._stage_without_lease(job, group)
        if to is group.stage:
            return False
        error = rules.last_words(to, group.attempts, group.last_error)
        if self._ends_in_halves(job, group, to):
            self._in_halves(job, group, now, error or "")
            return False
        group.put_down(to, now, error)
        self._say_if_lost(job, group, error)
        job.settle(now)
        return True

    def _say_if_lost(
        self, job: Job, group: Group, error: str | None, actor: str | None = None
    ) -> None:
        if group.stage is Stage.FAILED:
            index = next(i for i, one in job.groups.items() if one is group)
            self._say(job, EntryKind.LOST, entries.lost(index, group.new.rows, error), actor)

    def _in_halves(self, job: Job, group: Group, now: float, error: str) -> int:
        """Cut a group that nobody holds any more; returns the second half's index."""
        index = self._cut(job, group, cut_rules.half(group.new.rows), now)
        for half in (group, job.groups[index]):
            half.put_down(half.stage, now, error)
            half.attempts = cut_rules.attempts_spent(half.new.rows, self._max_attempts)
        group.generation += 1
        return index

    def _cut(self, job: Job, group: Group, keep: int, now: float) -> int:
        """The group keeps its first rows; returns the index of the new one with the others."""
        whole = cut_rules.Slice(group.row_start, group.new.rows, group.new.prompt_tokens)
        first, rest = cut_rules.cut(whole, keep)
        index = rules.FIRST_CUT_INDEX + len(job.groups) - job.planned
        new = replace(group.new, index=index)
        cut_off = Group(group.stage, now, new=new, drafts=group.drafts, results=group.results)
        for part, one in ((first, group), (rest, cut_off)):
            one.new = replace(one.new, rows=part.rows, prompt_tokens=part.prompt_tokens)
            one.row_start, one.row_stop = part.row_start, part.row_stop
        group.cut_wanted = False
        job.groups[index] = cut_off
        job.update(groups_total=len(job.groups))
        return index

    def _ends_in_halves(self, job: Job, group: Group, to: Stage, whole: bool = False) -> bool:
        return cut_rules.ends_in_halves(
            group.stage,
            to,
            group.new.rows,
            cancelled=job.row.cancel_requested,
            whole=whole or group.rows_kept > 0,
            groups_cut=len(job.groups) - job.planned,
        )

    def _may_claim(self, group: Group, owner: str, now: float) -> bool:
        """One group at a time that may be what workers die of."""
        if group.stage not in cut_rules.CUT_AT:
            return True
        if not group.is_suspect(group.attempts, self._max_attempts):
            return True
        return not any(
            held.is_suspect(held.attempts - 1, self._max_attempts)
            for job in self._jobs.values()
            for held in job.groups.values()
            if held.owner == owner and held.lease_until > now and held.stage is group.stage
        )
