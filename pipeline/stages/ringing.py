"""Which bells a stage rings besides its own next one. A lost bell costs time: the sweeper rings."""

from __future__ import annotations

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.client import Ring
from specbatch.schemas.records import Bell, JobRow, Lease, Stage


class Ringing:
    """What the stages ring with."""

    def __init__(self, store: Store, ring: Ring) -> None:
        self._store = store
        self._ring = ring

    def _ring_again(self, lease: Lease, cut_off: int | None = None) -> None:
        """For the unit that was given back, and for the half that was cut off from it.

        If that failed it for good, perhaps for publishing.
        """
        job = self._store.get_job(lease.job_id)
        model = self._model_of(job, lease.stage)
        for index in (lease.group_index, cut_off):
            if index is not None:
                self._ring(Bell(lease.job_id, lease.stage, index, model, job.priority))
        self._ring_job(lease.job_id)

    def _ring_suspects(self, job_id: str) -> None:
        """For the job's groups that are due at VERIFY: this worker may have been refused them."""
        for bell in self._store.due(job_id=job_id):
            if bell.stage is Stage.VERIFY:
                self._ring(bell)

    def _ring_job(self, job_id: str) -> None:
        """Ring for publishing when this was the last thing it waited for."""
        job = self._store.get_job(job_id)
        if job.stage is Stage.PUBLISH:
            self._ring(Bell(job_id, Stage.PUBLISH, None, priority=job.priority))

    def _ring_for(self, lease: Lease, stage: Stage, job: JobRow) -> None:
        """For the group's next stage."""
        model = job.verifier if stage is Stage.VERIFY else None
        self._ring(Bell(lease.job_id, stage, lease.group_index, model, job.priority))

    @staticmethod
    def _model_of(job: JobRow, stage: Stage) -> str | None:
        return job.proposer if stage is Stage.PROPOSE else job.verifier
