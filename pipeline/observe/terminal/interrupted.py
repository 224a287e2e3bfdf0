"""Which jobs were left in the middle: a process that is killed tells nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from specbatch.schemas.backlog import WorkerNow
from specbatch.schemas.records import JobRow, JobState

INTERRUPTED = "interrupted"


def is_interrupted(
    job: JobRow,
    holders: Callable[[str], Sequence[str]],
    workers: Sequence[WorkerNow],
    lease_sec: float,
) -> bool:
    """Whether a job was begun, nobody holds any of it, and no live worker would take it up.

    `holders` tells who holds leases of a job that have not run out. `workers` are those that have
    not ended. One that was not heard of for a whole lease has lost what it held, so it counts as
    dead here.
    """
    if job.state is not JobState.RUNNING or any(_may_take(job, workers, lease_sec)):
        return False
    return not holders(job.job_id)


def _may_take(job: JobRow, workers: Iterable[WorkerNow], lease_sec: float) -> Iterable[bool]:
    return (
        one.serves is None or one.serves.works_on(job.job_id)
        for one in workers
        if one.silent_sec <= lease_sec
    )


def interrupted_line(job_id: str) -> str:
    """What to do about such a job."""
    return (
        f"job {job_id} was interrupted and nobody works on it: "
        f"`{resume_command(job_id)}` resumes it"
    )


def resume_command(job_id: str) -> str:
    """The command that resumes a job in one process."""
    return f"specbatch retry {job_id} --local"
