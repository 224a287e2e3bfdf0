"""A store that counts what a worker does with it.

The stages do not know that they are measured. Only what the store accepted is counted: a refused
commit is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.observe.metrics.meter import Meter
from specbatch.pipeline.runtime.client import Enqueue
from specbatch.schemas.audit import PublishedManifest
from specbatch.schemas.numeric_class import Serves
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
    RejectedRow,
    Released,
    SourcePosition,
    Stage,
    StageTiming,
)
from specbatch.schemas.timekeeping import Spent

if TYPE_CHECKING:  # the light install has no numpy
    from specbatch.pipeline.engines.contract import Engines


def kv_blocks(host: Engines) -> list[tuple[int, int, int]]:
    """Held, free and cached blocks of each engine."""
    return [stats.kv_blocks for stats in host.stats]


def metered(store: Store, meter: Meter) -> Store:
    """The same store; `meter` counts what it accepts."""
    return cast(Store, MeteredStore(store, meter))  # everything else is the store's


def counted(enqueue: Enqueue, on_enqueued: Callable[[Stage], None]) -> Enqueue:
    """The same, and `on_enqueued` is called after each message."""

    def enqueue_and_count(work: DueWork) -> None:
        enqueue(work)
        on_enqueued(work.stage)

    return enqueue_and_count


class MeteredStore:
    """Passes everything on to the store; the methods below are counted."""

    def __init__(self, store: Store, meter: Meter) -> None:
        self._store = store
        self._meter = meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __repr__(self) -> str:
        return repr(self._store)

    # --- jobs -------------------------------------------------------------------------------
    def get_job(self, job_id: str) -> JobRow:
        job = self._store.get_job(job_id)
        self._meter.knows(job)
        return job

    def fail_job(self, lease: Lease, error: str) -> None:
        with self._meter.asking(lease, ends=True):  # it is not retried
            self._store.fail_job(lease, error)

    # --- leases -----------------------------------------------------------------------------
    def claim_job(self, job_id: str, stage: Stage, owner: str, lease_sec: float) -> JobWork | None:
        work = self._store.claim_job(job_id, stage, owner, lease_sec)
        if work is not None:
            self._meter.claimed(work.lease)
        return work

    def claim_group(
        self,
        job_id: str,
        index: int,
        stage: Stage,
        owner: str,
        lease_sec: float,
        serves: Serves | None = None,
    ) -> GroupWork | None:
        work = self._store.claim_group(job_id, index, stage, owner, lease_sec, serves)
        return self._claimed(work)

    def claim_next(
        self,
        stage: Stage,
        model: str,
        owner: str,
        lease_sec: float,
        serves: Serves | None = None,
    ) -> GroupWork | None:
        return self._claimed(self._store.claim_next(stage, model, owner, lease_sec, serves))

    def _claimed(self, work: GroupWork | None) -> GroupWork | None:
        if work is not None:
            self._meter.claimed(work.lease, work.waited_sec)
        return work

    def heartbeat(self, leases: Sequence[Lease], lease_sec: float) -> Beat:
        beat = self._store.heartbeat(leases, lease_sec)
        self._meter.missed(beat.lost)
        return beat

    def release(
        self, lease: Lease, error: str, forgiven: bool = False, whole: bool = False
    ) -> Released:
        with self._meter.asking(lease, ends=True):
            released = self._store.release(lease, error, forgiven, whole)
            self._meter.given_back(lease, is_failure=released.was_held and not forgiven)
        return released

    def cancel_group(self, lease: Lease) -> None:
        with self._meter.asking(lease, ends=True):
            self._store.cancel_group(lease)

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
        with self._meter.asking(lease):
            self._store.add_groups(lease, groups, rejected, next_row, cursor, from_row)
        self._meter.quarantined(row.code for row in rejected)

    def finish_ingest(
        self,
        lease: Lease,
        rows_total: int,
        models: Mapping[str, Any],
        from_row: int | None = None,
    ) -> None:
        with self._meter.asking(lease):
            self._store.finish_ingest(lease, rows_total, models, from_row)
            self._meter.done(lease)

    def pause_ingest(self, lease: Lease, most_open: int) -> int:
        with self._meter.asking(lease):
            room = self._store.pause_ingest(lease, most_open)
            if not room:
                self._meter.done(lease)
        return room

    # --- groups -----------------------------------------------------------------------------
    def advance(
        self,
        lease: Lease,
        to: Stage,
        artefact: Artefact | None,
        timing: StageTiming,
        spent: Spent | None = None,
    ) -> None:
        with self._meter.asking(lease):
            self._store.advance(lease, to, artefact, timing, spent)
            self._meter.done(lease)

    def commit_group(
        self,
        lease: Lease,
        completions: Sequence[CompletionRecord],
        timing: StageTiming,
        report: Mapping[str, float],
    ) -> Stage | None:
        with self._meter.asking(lease):
            due = self._store.commit_group(lease, completions, timing, report)
            self._meter.recorded(lease.job_id, completions)
            self._meter.done(lease)
        return due

    def keep_part(
        self,
        lease: Lease,
        completions: Sequence[CompletionRecord],
        timing: StageTiming,
        report: Mapping[str, float],
        spent: Spent | None = None,
    ) -> None:
        with self._meter.asking(lease):
            self._store.keep_part(lease, completions, timing, report, spent)
            self._meter.recorded(lease.job_id, completions)
            self._meter.done(lease)

    # --- publish ----------------------------------------------------------------------------
    def finish_job(
        self,
        lease: Lease,
        state: JobState,
        error: str | None = None,
        manifest: PublishedManifest | None = None,
    ) -> None:
        with self._meter.asking(lease):
            self._store.finish_job(lease, state, error, manifest)
            self._meter.done(lease)

    # --- the sweeper ------------------------------------------------------------------------
    def due(self, limit: int = 256, job_id: str | None = None) -> list[DueWork]:
        due = self._store.due(limit, job_id)
        if job_id is None:
            self._meter.swept()
        return due
