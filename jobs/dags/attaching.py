"""Attaches a task of any scheduler to a job, waits for its end and turns it into a verdict.

A try that finds the job of an earlier try resumes it. So a job is paid for once, however often its
task dies. Knows none of the schedulers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from specbatch.jobs.client import JobClient, Outcome, Standing
from specbatch.schemas.errors import JobNotFoundError, OutputError, StoreError, UsageError
from specbatch.schemas.records import JobState
from specbatch.schemas.spec import JobSpec

log = logging.getLogger(__name__)

SPEC_CHANGED = "cancelled for another job of its task: the task's spec has changed"
PATIENCE_SEC = 300.0  # a try fails when the store is out of reach for so long

OnPartial = Literal["fail", "succeed", "skip"]


@dataclass(frozen=True, slots=True)
class Place:
    """The task instance that owns jobs, and which of them. All tries have the same place."""

    scheduler: str  # airflow, dagster, prefect
    dag: str
    run: str
    task: str
    index: str = ""  # of a mapped task or a partition
    number: int = 1  # of its jobs: a changed input makes another one

    def key(self, spec: JobSpec) -> str:
        """The idempotency key: the same place, spec and number give the same job."""
        parts = [self.dag, self.run, self.task, self.index, spec.digest()]
        parts += [str(self.number)] if self.number > 1 else []
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return f"{self.scheduler}:{digest}"

    @property
    def killed(self) -> str:
        """The stop reason of a job whose task was killed here. The job's key has the details."""
        return f"cancelled with its task in {self.scheduler}"


def with_input(client: JobClient, spec: JobSpec, place: Place) -> Place:
    """The place with the number of its job for the input that is there now: the newest one, or a
    new one if the newest has read another version.

    Cancels nothing: a new job needs the output, which the newest one holds, also once it is
    cancelled. Where the input is gone or cannot be listed, the newest job stays. Raises
    `OutputError` where that job is still open or its output is in the way, and `ObjectError` for a
    store of objects that may answer later.
    """
    place, job_id = _newest(client, spec, place)
    read = None if job_id is None else client.version_read(job_id)
    if job_id is None or read is None:  # it will read what is there now
        return place
    version = client.input_version(spec)
    if version is None or version == read:
        return place
    found = client.poll(job_id)
    if not found.is_final or client.output_holder(spec) == job_id:
        raise OutputError(_in_the_way(found, spec, "the input has changed since it was read by"))
    log.info("the input has changed since job %s read it: another job is made of it", job_id)
    return replace(place, number=place.number + 1)


def check_earlier(
    client: JobClient, spec: JobSpec, place: Place, earlier: str | None
) -> str | None:
    """The id of an earlier try's job that is still open though this try has another spec, if there
    is one: nobody waits for it any more. `earlier`: the job that the task had last.

    Raises `OutputError` where that job writes to the output that the spec names.
    """
    if earlier is None or client.find(spec.tenant, place.key(spec)) == earlier:
        return None
    try:
        found = client.poll(earlier)
    except JobNotFoundError:
        return None
    if found.is_final:
        return None
    if client.writes_to(earlier, spec):
        raise OutputError(
            _in_the_way(found, spec, "the spec has changed since it was submitted as")
        )
    return earlier


def _in_the_way(found: Standing, spec: JobSpec, why: str) -> str:
    """Why another job cannot be made of a task, and what to do."""
    job = f"job {found.job_id} of an earlier try, which is {found.state}"
    ends = "" if found.is_final else f"end it with `specbatch cancel {found.job_id}`, then "
    return (
        f"{why} {job} and has output {spec.output.uri}: {ends}move that output away or name "
        "another one, and run this task again"
    )


def _newest(client: JobClient, spec: JobSpec, place: Place) -> tuple[Place, str | None]:
    """The newest of a place's jobs; None: it has none yet."""
    job_id = client.find(spec.tenant, place.key(spec))
    later = replace(place, number=place.number + 1)
    while job_id and (found := client.find(spec.tenant, later.key(spec))):
        place, job_id, later = later, found, replace(later, number=later.number + 1)
    return place, job_id


def attach(client: JobClient, spec: JobSpec, place: Place, on_partial: OnPartial) -> str:
    """The id of the place's job: submitted now, or found, and retried if it failed."""
    job = client.submit(spec, place.key(spec))
    if job.created:
        log.info("job %s submitted", job.job_id)
        return job.job_id
    log.info("job %s was submitted by an earlier try and is %s", job.job_id, job.state)
    if _is_retried(job.state, on_partial) and (units := client.retry(job.job_id)):
        log.info("job %s: %d units are retried", job.job_id, units)
    return job.job_id


def _is_retried(state: JobState, on_partial: OnPartial) -> bool:
    """Whether a new try does the rest of a job that has ended.

    The failure that an earlier try reported is the reason for this try.
    """
    return state is JobState.FAILED or (state is JobState.PARTIAL and on_partial == "fail")


def cancel_with_task(client: JobClient, spec: JobSpec, place: Place) -> str | None:
    """Cancel the newest of the place's jobs, even if the store never returned its id.

    Returns the id, or None if no job was submitted.
    """
    _, job_id = _newest(client, spec, place)
    if job_id is not None:
        client.cancel(job_id, place.killed)
    return job_id


def revive(client: JobClient, standing: Standing, place: Place) -> bool:
    """Resume a job that an earlier try's kill cancelled, because a user started this try since.

    A job that another user, its deadline or its budget stopped stays stopped.
    """
    if standing.state is not JobState.CANCELLED or standing.stop_reason != place.killed:
        return False
    units = client.retry(standing.job_id)
    log.info("job %s was cancelled with an earlier try: %d units continue", standing.job_id, units)
    return units > 0


@dataclass(slots=True)
class Watch:
    """Polls a job, and tolerates short outages of the store."""

    job_id: str
    clock: Callable[[], float] = time.monotonic
    patience_sec: float = PATIENCE_SEC
    _blind_since: float | None = field(default=None, init=False)

    def poll(self, client: Callable[[], JobClient]) -> Standing | None:
        """The job's state; None during an outage. Raises `StoreError` when that lasts too long."""
        try:
            standing = client().poll(self.job_id)
        except StoreError as error:
            now = self.clock()
            self._blind_since = now if self._blind_since is None else self._blind_since
            if now - self._blind_since >= self.patience_sec:
                raise
            log.warning("job %s cannot be checked for the moment: %s", self.job_id, error)
            return None
        self._blind_since = None
        return standing


def wait(
    client: JobClient,
    job_id: str,
    place: Place,
    poll_sec: float,
    pause: Callable[[float], object] = time.sleep,
) -> Outcome:
    """Poll until the job has ended. `pause` waits, and raises to end the waiting."""
    while revive(client, _until_final(client, job_id, poll_sec, pause), place):
        pause(poll_sec)
    return client.outcome(job_id)


def _until_final(
    client: JobClient, job_id: str, poll_sec: float, pause: Callable[[float], object]
) -> Standing:
    watch = Watch(job_id)
    while True:
        standing = watch.poll(lambda: client)
        if standing is not None and standing.is_final:
            return standing
        pause(poll_sec)


class Verdict(StrEnum):
    """What a job's end means for its task."""

    SUCCEED = "succeed"
    SKIP = "skip"  # downstream tasks are skipped, without an error
    FAIL = "fail"  # another try may succeed
    GIVE_UP = "give up"  # no other try can succeed


def judge(outcome: Outcome, on_partial: OnPartial) -> Verdict:
    """The verdict for a job's end. For a partial job the user decides."""
    if outcome.state is JobState.DONE:
        return Verdict.SUCCEED
    if outcome.state is JobState.PARTIAL:
        if on_partial == "succeed":
            return Verdict.SUCCEED
        if on_partial == "skip":
            return Verdict.SKIP
        # A retry would reject the same input rows again.
        return Verdict.FAIL if outcome.failed_groups else Verdict.GIVE_UP
    if outcome.state is JobState.FAILED:
        return Verdict.FAIL
    return Verdict.GIVE_UP  # cancelled on purpose


def remedy(outcome: Outcome) -> str:
    """What a user can do about it, as the end of a sentence."""
    if outcome.state is JobState.CANCELLED:
        return (
            f"run `specbatch retry {outcome.job_id}` to finish it, then clear this task, which "
            "waits for it"
        )
    if outcome.state is JobState.PARTIAL:
        return (
            f"`specbatch results {outcome.job_id} --failed` lists the rows; `on_partial` says what "
            "this means to the task"
        )
    return f"`specbatch show {outcome.job_id}` says why"


def check_on_partial(value: str) -> OnPartial:
    """Check the option `on_partial`. Raises `UsageError` for any other word."""
    if value not in ("fail", "succeed", "skip"):
        raise UsageError(f"on_partial is fail, succeed or skip, not {value!r}")
    return value  # type: ignore[return-value]  # checked in the line above
