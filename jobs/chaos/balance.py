"""The law of money: what rows were given is what the attempts had that made them, and what nobody
was given was lost, idle or overhead. In whole units, to the last one.

Read from the store alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.policy.costs.balance import (
    Amount,
    Sheet,
    at,
    by_kind,
    job_sheet,
    leased,
    rows_sheet,
    sessions_sheet,
)
from specbatch.schemas.provenance import TimeKind
from specbatch.schemas.records import JobRow, Stage


def of_job(store: Store, job: JobRow, restored: bool = False) -> Iterator[str]:
    """What is wrong with the time of a job that has ended.

    An attempt is kept as a whole: a session may have been ended in its midst, by a worker whose
    clock is ahead. `restored`: the store was an older one meanwhile. It lacks what was told before,
    and attempts were made twice by one number: their time is held to nothing.
    """
    if restored:
        return
    rows = store.row_times(job.job_id)
    given, ahead = Sheet(), Amount()
    for row in rows:
        given += by_kind(row.ticks, row.price_microusd)
        ahead += at(row.ahead_ticks, row.ahead_price_microusd)
    verified, drafted = Sheet(), Amount()
    slices = list(store.time_slices(job.job_id))
    kept = {one.attempt for one in slices if one.kept}
    for one in slices:
        if one.attempt in kept and one.attempt.stage is Stage.VERIFY:
            verified += by_kind(one.ticks, one.device.price_microusd)
        elif one.attempt in kept and one.attempt.stage is Stage.PROPOSE:
            drafted += at(one.ticks.total, one.device.price_microusd)
    wasted = bool(store.failed_groups(job.job_id))  # of their time some may be in no row
    for what, had, in_rows in (
        *((kind, verified.of(kind), given.of(kind)) for kind in TimeKind),
        ("drafts", drafted, ahead),
    ):
        if had != in_rows and not (wasted and had.units >= in_rows.units):
            yield f"of {what} time, attempts had {had} and their rows were given {in_rows}"


def of_all(store: Store) -> Iterator[str]:
    """What is wrong with the time of workers that have all ended, and of all their jobs."""
    sessions = store.sessions()
    for session in sessions:
        if session.leased is None:
            yield f"session {session.session_id} has not ended"
        elif session.leased != session.accounted:
            yield (
                f"session {session.session_id} was leased for {session.leased} ticks, of which "
                f"{session.accounted} are somewhere"
            )
    total = sessions_sheet(sessions)
    for job in store.list_jobs(limit=1_000_000):
        times, rows = store.job_times(job.job_id), store.row_times(job.job_id)
        sheet = job_sheet(times, rows, job.state.is_final)
        total += sheet
        if sheet.of(TimeKind.LOST).units < 0 or sheet.pending.units < 0:
            yield f"the rows of job {job.job_id} were given more than it had"
        if sheet.total.units < rows_sheet(rows).total.units:
            yield f"job {job.job_id} cost less than its rows"
    if total.total != leased(sessions):
        yield f"{leased(sessions)} was leased, and {total.total} is somewhere"
