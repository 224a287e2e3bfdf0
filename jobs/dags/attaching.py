"""What a task of any scheduler does with a job: attach to it, wait for its end, judge that.

A try of a task that finds the job of an earlier try goes on with it. So a job is paid for once,
however often its task dies. Knows neither Airflow nor Dagster.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from specbatch.jobs.client import JobClient, Outcome, Standing
from specbatch.schemas.errors import StoreError, UsageError
from specbatch.schemas.records import JobState
from specbatch.schemas.spec import JobSpec

log = logging.getLogger(__name__)

PATIENCE_SEC = 300.0  # the store may be away so long before a try fails

OnPartial = Literal["fail", "succeed", "skip"]


@dataclass(frozen=True, slots=True)
class Place:
    """The task instance that wants a job, whichever try of it."""

    scheduler: str  # airflow, dagster
    dag: str
    run: str
    task: str
    index: str = ""  # of a mapped task or a partition

    def key(self, spec: JobSpec) -> str:
        """The idempotency key: the same place with the same spec is the same job."""
        parts = [self.dag, self.run, self.task, self.index, spec.digest()]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return f"{self.scheduler}:{digest}"

    @property
    def killed(self) -> str:
        """The reason that a job has whose task was killed here. Its key tells more, and no text."""
        return f"cancelled with its task in {self.scheduler}"


def attach(client: JobClient, spec: JobSpec, place: Place, on_partial: OnPartial) -> str:
    """The id of the place's job: submitted now, or found and, where it failed, begun again."""
    job = client.submit(spec, place.key(spec))
    if job.created:
        log.info("job %s submitted", job.job_id)
        return job.job_id
    log.info("job %s was submitted by an earlier try and is %s", job.job_id, job.state)
    # What an earlier try was told of is what this one was started for.
    again = job.state is JobState.FAILED or (job.state is JobState.PARTIAL and on_partial == "fail")
    if again and (units := client.retry(job.job_id)):
        log.info("job %s: %d failed units are done again", job.job_id, units)
    return job.job_id


def cancel_with_task(client: JobClient, spec: JobSpec, place: Place) -> str | None:
    """Cancel the place's job, also where its id never came back from the store; the id.

    None: no job was submitted.
    """
    job_id = client.find(spec.tenant, place.key(spec))
    if job_id is not None:
        client.cancel(job_id, place.killed)
    return job_id


def revive(client: JobClient, standing: Standing, place: Place) -> bool:
    """Have the rest of a job done that an earlier try's kill cancelled: this try was asked for
    since. A job that somebody else stopped, or its deadline or budget did, stays as it is.
    """
    if standing.state is not JobState.CANCELLED or standing.stop_reason != place.killed:
        return False
    units = client.retry(standing.job_id)
    log.info("job %s was cancelled with an earlier try: %d units continue", standing.job_id, units)
    return units > 0


@dataclass(slots=True)
class Watch:
    """Looks at a job now and then, through outages of the store that are not too long."""

    job_id: str
    clock: Callable[[], float] = time.monotonic
    patience_sec: float = PATIENCE_SEC
    _blind_since: float | None = field(default=None, init=False)

    def look(self, client: Callable[[], JobClient]) -> Standing | None:
        """How the job stands; None while that cannot be known. Raises `StoreError` in the end."""
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
    """Look until the job has ended. `pause` waits, and raises where the waiting is to end."""
    watch = Watch(job_id)
    while True:
        standing = watch.look(lambda: client)
        if standing is not None and standing.is_final and not revive(client, standing, place):
            return client.outcome(job_id)
        pause(poll_sec)


class Verdict(StrEnum):
    """What a job's end means to its task."""

    SUCCEED = "succeed"
    SKIP = "skip"  # what follows the task does not happen, and nothing is wrong
    FAIL = "fail"  # another try may do better
    GIVE_UP = "give up"  # no other try will


def judge(outcome: Outcome, on_partial: OnPartial) -> Verdict:
    """What the end of a job means. Partial is neither done nor failed: the user says what it is."""
    if outcome.state is JobState.DONE:
        return Verdict.SUCCEED
    if outcome.state is JobState.PARTIAL:
        if on_partial == "succeed":
            return Verdict.SUCCEED
        if on_partial == "skip":
            return Verdict.SKIP
        # Rows that the input's check refused are refused again.
        return Verdict.FAIL if outcome.failed_groups else Verdict.GIVE_UP
    if outcome.state is JobState.FAILED:
        return Verdict.FAIL
    return Verdict.GIVE_UP  # cancelled: somebody wanted it so


def remedy(outcome: Outcome) -> str:
    """What a person can do about it; it ends a sentence."""
    if outcome.state is JobState.CANCELLED:
        return (
            f"`specbatch retry {outcome.job_id}` does the rest; clear this task then, and it waits "
            "for it"
        )
    if outcome.state is JobState.PARTIAL:
        return (
            f"`specbatch show {outcome.job_id}` lists the rows; `on_partial` says what this "
            "means to the task"
        )
    return f"`specbatch show {outcome.job_id}` says why"


def check_on_partial(value: str) -> OnPartial:
    """Raises `UsageError` for any other word."""
    if value not in ("fail", "succeed", "skip"):
        raise UsageError(f"on_partial is fail, succeed or skip, not {value!r}")
    return value  # type: ignore[return-value]  # checked in the line above
