"""Numeric classes of jobs in `MemoryStore`: the twin of `serving.py` and `moving.py`."""

from __future__ import annotations

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.memory.time import TimeInMemory
from specbatch.pipeline.ledger.memory.units import Job
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.numeric_class import Change, Pinned, Serves, key_of_spec, preferred
from specbatch.schemas.records import Stage
from specbatch.schemas.timekeeping import LEASES_OF_SILENCE


class ServingInMemory(TimeInMemory):
    """What a job has pinned, beside what workers serve."""

    def _pin(self, job: Job, serves: Serves, owner: str, lease_sec: float) -> None:
        if job.row.numeric_class is not None:
            return
        heard = self._now() - LEASES_OF_SILENCE * lease_sec
        others = [
            session.row.serves
            for session in self._sessions.values()
            if session.row.ended_at is None and session.beat_at > heard
            if session.row.serves and session.row.serves.model == job.row.verifier
            if session.row.serves.has_model(job.row.model_fingerprint)
            if session.row.serves.works_on(job.row.job_id)
            if session.row.owner != owner
        ]
        name = preferred(key_of_spec(job.row.spec), serves, [serves, *others])
        assert name is not None, "a worker announces a class for every way to ask for an engine"
        self._say(job, EntryKind.PINNED, {"numeric_class": name}, owner)
        job.update(numeric_class=name)

    def _move(self, job: Job, change: Change, quarantined: bool) -> int:
        rules.check_move(job.row, change, quarantined)
        pinned = rules.columns_of(job.row, change)
        if not pinned:
            return 0
        self._say(job, EntryKind.PINNED, pinned)
        job.update(**pinned)
        now = self._now()
        for group in job.groups.values():
            if group.stage is Stage.VERIFY:
                group.generation += 1
                ready_at = now if group.lease_until > now else group.ready_at
                group.move(Stage.VERIFY, ready_at)
                group.cut_wanted = False
        return sum(group.stage in rules.CANCELLABLE for group in job.groups.values())


def served(job: Job, serves: Serves | None) -> bool:
    """Whether such a worker may verify the job. None: it may verify any."""
    if serves is None:
        return True
    return serves.works_on(job.row.job_id) and serves.takes(Pinned.of(job.row))
